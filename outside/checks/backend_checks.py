"""Checks of a gateway whose only node is a server of another project.

The clients are OpenAI's and Anthropic's libraries. The gateway polls the server each second.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
from backend import ADMIN, CAP, CAPPED, COUNTED, KEY, Backend, eventually, gateway, get, serves
from checking import MODEL, SETTINGS, Skipped, check, expect, run

PATIENCE = 1200.0
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
COUNT: list[Any] = [{"role": "user", "content": "Count from 1 to 2000, one number per line, with all numbers."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
FORCED: Any = {"type": "function", "function": {"name": "get_weather"}}
FORM: Any = SETTINGS.get("response_format", {"type": "json_schema", "json_schema": {"name": "w", "schema": PARAMETERS}})
CLAUDE_TOOLS: list[Any] = [{"name": "get_weather", "description": "Weather", "input_schema": PARAMETERS}]
ENDS = ("stop", "length")
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # Anthropic's library has no such parameter

backend = Backend()
url = ""


def chat(key: str = KEY) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False, timeout=PATIENCE)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http)


def claude(key: str = KEY) -> anthropic.Anthropic:
    http = anthropic.DefaultHttpxClient(trust_env=False, timeout=PATIENCE)
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, http_client=http)


def ask(messages: list[Any] = QUESTION, key: str = KEY, **fields: Any) -> Any:
    request: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0, **fields}
    return chat(key).chat.completions.create(**request)


def ask_claude(messages: list[Any] = QUESTION, key: str = KEY, **fields: Any) -> Any:
    request: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 24, **GREEDY, **fields}
    return claude(key).messages.create(**request)


def ended(stream: Iterable[Any]) -> tuple[str, int]:
    """Read a stream of chat chunks to its end. Return its text and the number of chunks with text.

    Raises:
        AssertionError: no chunk has a finish reason.
    """
    texts: list[str] = []
    reason = None
    for chunk in stream:
        for choice in chunk.choices:
            texts += [choice.delta.content] if choice.delta.content else []
            reason = choice.finish_reason or reason
    assert reason in ENDS, f"finish reason {reason!r} after {len(texts)} chunks"
    return "".join(texts), len(texts)


def ended_claude(events: Iterable[Any]) -> int:
    """Read a Messages stream to its end. Return the number of its text deltas."""
    count, reason, last = 0, None, ""
    for event in events:
        count += event.type == "content_block_delta"
        reason = event.delta.stop_reason if event.type == "message_delta" else reason
        last = event.type
    assert (reason in ("end_turn", "max_tokens")) and last == "message_stop", f"{reason!r}, {last!r} after {count}"
    return count


def _skip_without_call(call: Any) -> None:
    if not call and SETTINGS.get("ignores_tool_choice"):
        raise Skipped("the server does not force the model to call a tool")


# Formats


def total(message: Any) -> int:
    """Return the number of tokens of a Messages answer and its prompt."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) + message.usage.output_tokens


@check
def chat_whole():
    completion = ask()
    assert completion.choices[0].message.content
    assert completion.choices[0].finish_reason in ENDS
    assert completion.usage.prompt_tokens > 5 and 0 < completion.usage.completion_tokens <= 24


@check
def chat_streamed():
    assert ended(ask(stream=True))[0] == ask().choices[0].message.content


@check
def chat_streamed_with_usage():
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    if not SETTINGS.get("counts_streams", True):
        raise Skipped("the server counts no tokens of streams")
    assert chunks[-1].usage.completion_tokens > 0


@check
def forced_tool():
    message = ask(tools=TOOLS, tool_choice=FORCED, max_tokens=60).choices[0].message
    _skip_without_call(message.tool_calls)
    assert message.tool_calls[0].function.name == "get_weather"
    assert "city" in json.loads(message.tool_calls[0].function.arguments)


@check
def forced_tool_streamed():
    arguments, name = "", ""
    for chunk in ask(tools=TOOLS, tool_choice=FORCED, max_tokens=60, stream=True):
        for call in (chunk.choices[0].delta.tool_calls or ()) if chunk.choices else ():
            name = name or call.function.name
            arguments += call.function.arguments or ""
    _skip_without_call(name)
    assert name == "get_weather" and "city" in json.loads(arguments)


@check
def tool_result_is_read():
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
    assert ask([*QUESTION, *turns], tools=TOOLS).choices[0].finish_reason


@check
def schema():
    assert "city" in json.loads(ask(response_format=FORM, max_tokens=60).choices[0].message.content)


@check
def completions():
    request: dict[str, Any] = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
    whole = chat().completions.create(**request)
    stream = chat().completions.create(**request, stream=True)
    assert whole.choices[0].text
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


@check
def messages_whole():
    message = ask_claude()
    assert message.content[0].text and message.stop_reason in ("end_turn", "max_tokens")
    assert total(message) - message.usage.output_tokens > 5
    assert 0 < message.usage.output_tokens <= 24


@check
def messages_streamed():
    with claude().messages.stream(model=MODEL, messages=QUESTION, max_tokens=24, **GREEDY) as stream:
        message = stream.get_final_message()
    assert message.content[0].text == ask_claude().content[0].text
    assert message.usage.output_tokens > 0


@check
def messages_with_a_forced_tool():
    forced: Any = {"type": "tool", "name": "get_weather"}
    for stream in (False, True):
        if stream:
            with claude().messages.stream(
                model=MODEL, messages=QUESTION, max_tokens=60, tools=CLAUDE_TOOLS, tool_choice=forced
            ) as events:
                message = events.get_final_message()
        else:
            message = ask_claude(tools=CLAUDE_TOOLS, tool_choice=forced, max_tokens=60)
        uses = [block for block in message.content if block.type == "tool_use"]
        _skip_without_call(uses)
        (use,) = uses
        assert use.name == "get_weather" and "city" in use.input, message
        assert message.stop_reason == "tool_use", message


def claude_code_turns() -> list[Any]:
    """Return turns with consecutive messages of the user, and with text after a tool result."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
    reminder = {"type": "text", "text": "<system-reminder>Answer in one word.</system-reminder>"}
    return [
        {"role": "user", "content": [reminder]},
        *QUESTION,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result, reminder]},
    ]


@check
def messages_in_the_order_of_claude_code():
    turns = claude_code_turns()
    assert ask_claude(turns, tools=CLAUDE_TOOLS, system="Be brief.").stop_reason
    assert claude().messages.count_tokens(model=MODEL, messages=turns, tools=CLAUDE_TOOLS).input_tokens > 20


@check
def responses():
    request: dict[str, Any] = {"model": MODEL, "input": "What is the weather in Paris?", "max_output_tokens": 24}
    whole = chat().responses.create(**request, temperature=0)
    assert whole.output_text and whole.usage and whole.usage.output_tokens > 0
    events = list(chat().responses.create(**request, temperature=0, stream=True))
    assert events[-1].type in ("response.completed", "response.incomplete"), events[-1].type
    assert events[-1].response.output_text == whole.output_text


# Errors


@check
def prompt_over_the_context_length():
    long: Any = [{"role": "user", "content": "word " * (SETTINGS["context"] * 5 // 4)}]
    error = expect(openai.BadRequestError, lambda: ask(long))
    assert error.code == "context_length_exceeded", error
    error = expect(anthropic.BadRequestError, lambda: ask_claude(long))
    assert "prompt is too long" in str(error), error


@check
def unknown_model():
    expect(openai.NotFoundError, lambda: ask(model="no-such-model"))
    expect(anthropic.NotFoundError, lambda: ask_claude(model="no-such-model"))


# Budgets


def spent(key: str) -> int:
    entries = get(f"{url}/api/keys", ADMIN)["keys"]
    return next(entry["spent"] for entry in entries if entry["key_id"] == key)


@check
def budget_is_charged_with_the_counts_of_the_server():
    usage = ask(key=COUNTED).usage
    counts = [usage.total_tokens, total(ask_claude(key=COUNTED))]
    assert spent(COUNTED) == sum(counts), (spent(COUNTED), counts)
    assert ended(ask(key=COUNTED, stream=True))
    if SETTINGS.get("counts_streams", True):
        assert spent(COUNTED) == sum(counts) + usage.total_tokens, (spent(COUNTED), counts)
    else:
        assert spent(COUNTED) > sum(counts) + usage.completion_tokens  # an estimate


@check
def budget_is_not_exceeded():
    error = None
    for _ in range(CAP):
        try:
            ask(key=CAPPED, max_tokens=200)
        except openai.RateLimitError as raised:
            error = raised
            break
    assert error is not None and error.code == "insufficient_quota", error
    assert 0 < spent(CAPPED) <= CAP


# Failures


def restart(arguments: Sequence[str] = ()) -> None:
    """Restart the server with additional arguments, and wait until the gateway can serve the model."""
    backend.end()
    eventually(lambda: not serves(url), "the gateway notices that the server is down")
    backend.start(arguments)
    eventually(lambda: serves(url), "the gateway serves the model again")


LONG = (lambda: ask(COUNT, stream=True, max_tokens=800), lambda: ask_claude(COUNT, stream=True, max_tokens=800))


@check
def server_is_free_after_a_cancelled_stream():
    for begin in LONG:
        stream = begin()
        for _, _ in zip(range(4), stream, strict=False):
            pass
        stream.close()
    assert ask(max_tokens=4).choices[0].finish_reason


@check
def busy_server_serves_all():
    begun = threading.Event()

    def marked(stream: Iterable[Any]) -> Iterator[Any]:
        try:
            for chunk in stream:
                begun.set()
                yield chunk
        finally:
            begun.set()

    if shared := SETTINGS.get("shared"):
        restart(shared)
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(lambda: ended(marked(ask(COUNT, stream=True, max_tokens=400)))[1])
        begun.wait(PATIENCE)
        others: list[Callable[[], Any]] = [
            lambda: ended(ask(stream=True)),
            lambda: ask().choices[0].message.content,
            lambda: ended_claude(ask_claude(stream=True)),
            lambda: ask_claude().content[0].text,
        ]
        answers = [pool.submit(other) for other in others]
        assert first.result() > 50
        assert all(answer.result() for answer in answers)
    if shared:
        restart()


@check
def dead_server_is_an_error_and_returns():
    for begin, read, error in zip(LONG, (ended, ended_claude), (openai.APIError, anthropic.APIError), strict=True):
        stream = iter(begin())
        for _ in range(3):
            next(stream)
        backend.end()
        expect(error, lambda read=read, stream=stream: read(stream))
        assert expect(openai.APIStatusError, ask).status_code in (502, 503)
        restart()
        assert ask().choices[0].message.content


def chat_template_whose_roles_must_alternate():
    restart(SETTINGS["alternating"])
    assert ask_claude(claude_code_turns(), tools=CLAUDE_TOOLS).stop_reason
    assert ask([*QUESTION, *QUESTION]).choices[0].finish_reason
    restart()


if "alternating" in SETTINGS:
    check(chat_template_whose_roles_must_alternate)


# Long streams beside polls


@check
def long_streams_are_complete():
    count, at_once, seconds = SETTINGS["streams"], SETTINGS["at_once"], SETTINGS["stream_secs"]
    with ThreadPoolExecutor(at_once) as pool:
        pace = min(pool.map(lambda _: seconds_per_token(), range(at_once)))  # the others met more prefills

        def read(index: int) -> str:
            nonlocal pace
            duration, tokens = read_timed(index, round(seconds / pace))
            pace = duration / tokens  # other programs may use more or less of the CPU than before
            return f"{tokens} tokens in {duration:.0f} s"

        streams = [pool.submit(read, index) for index in range(count)]
        errors = [error for stream in streams if (error := stream.exception())]
    print(f"complete streams: {[stream.result() for stream in streams if not stream.exception()]}", flush=True)
    assert not errors, f"{len(errors)} of {count} streams failed, the first with {errors[0]}"


def seconds_per_token() -> float:
    """Return the time between two tokens of a chat stream, without the time before the first token."""
    times: list[float] = []

    def marked(stream: Iterable[Any]) -> Iterator[Any]:
        for chunk in stream:
            times.append(time.monotonic())
            yield chunk

    ended(marked(ask(COUNT, stream=True, max_tokens=48)))
    return (times[-1] - times[0]) / 48


def read_timed(index: int, limit: int) -> tuple[float, int]:
    """Read a chat stream, or a Messages stream for an odd `index`, to its end.

    Return its duration in seconds and the number of its tokens, which is at most `limit`.
    """
    begun = time.monotonic()
    if index % 2:
        tokens = ended_claude(ask_claude(COUNT, stream=True, max_tokens=limit))
    else:
        tokens = ended(ask(COUNT, stream=True, max_tokens=limit))[1]
    return time.monotonic() - begun, tokens


if __name__ == "__main__":
    backend.start()
    try:
        with gateway(backend) as url:
            run()
    finally:
        backend.end()
