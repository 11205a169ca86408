"""The official clients' four ways to ask one thing, and what they make of the answer, streamed or not."""

import json
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from clients.saying_stack import MODEL, SayingStack

LEAST_BUDGET = 1024
"""The fewest tokens of thinking that Anthropic's API has."""

Call = tuple[str, dict[str, Any] | None]
"""A name and arguments; None for arguments that broke off."""


@dataclass(frozen=True)
class Ask:
    """What is asked for, in no dialect's words; None and () are not said.

    Attributes:
        says: what the user says.
        history: calls and their results that were before, and what the user says after them.
        choice: `required` or `none`: whether the model has to call tools, or must not.
        parallel: whether it may call more than one.
        thinking: whether the model should.
        budget: tokens of thinking at most.
        schema: of the answer.
    """

    says: str
    max_tokens: int = 1000
    tools: tuple[dict[str, Any], ...] = ()
    forced: str | None = None
    choice: str | None = None
    parallel: bool | None = None
    history: tuple[tuple[Call, str], ...] = ()
    thinking: bool | None = None
    budget: int | None = None
    schema: dict[str, Any] | None = None
    stop: str | None = None
    n: int | None = None
    seed: int | None = None


@dataclass
class Answer:
    """One answer. `reason` is `stop`, `length` or `tool_calls`, whatever the dialect calls it."""

    text: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True)
class Reply:
    """All answers to an ask, and what they cost in tokens, thoughts being part of what was said."""

    answers: list[Answer]
    prompt: int
    said: int
    thought: int


class Dialect(Protocol):
    """Asks, and reads the reply."""

    async def __call__(self, stack: SayingStack, ask: Ask, *, stream: bool) -> Reply: ...


_USAGE = {"include_usage": True}


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, (), [], {})}


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _openai_reply(answers: list[Answer], usage: Any) -> Reply:
    details = usage.completion_tokens_details
    return Reply(answers, usage.prompt_tokens, usage.completion_tokens, details.reasoning_tokens if details else 0)


async def chat(stack: SayingStack, ask: Ask, *, stream: bool) -> Reply:
    """Chat completions, with OpenAI's client."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": ask.says}]
    for number, ((name, arguments), result) in enumerate(ask.history):
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
    fields = _present(
        tools=[{"type": "function", "function": tool} for tool in ask.tools],
        tool_choice=ask.choice or (ask.forced and {"type": "function", "function": {"name": ask.forced}}),
        parallel_tool_calls=ask.parallel,
        response_format=ask.schema and {"type": "json_schema", "json_schema": {"name": "answer", "schema": ask.schema}},
        stop=ask.stop,
        n=ask.n,
        seed=ask.seed,
        stream_options=_USAGE if stream else None,
        extra_body=_present(chat_template_kwargs=_present(enable_thinking=ask.thinking), thinking_budget=ask.budget),
    )
    create: Any = stack.openai.chat.completions.create
    reply = await create(model=MODEL, messages=messages, max_tokens=ask.max_tokens, stream=stream, **fields)
    answers = [Answer() for _ in range(ask.n or 1)]
    called: dict[tuple[int, int], list[str]] = {}
    parts = [chunk async for chunk in reply] if stream else [reply]
    for choice in [choice for part in parts for choice in part.choices]:
        answer, said = answers[choice.index], choice.delta if stream else choice.message
        answer.text += said.content or ""
        answer.thought += getattr(said, "reasoning_content", None) or ""
        answer.reason = choice.finish_reason or answer.reason
        for number, call in enumerate(said.tool_calls or ()):
            pieces = called.setdefault((choice.index, call.index if stream else number), [])
            pieces += [text for text in (call.function.name, call.function.arguments) if text]
    for (index, _), (name, *texts) in called.items():
        answers[index].calls.append((name, _arguments("".join(texts))))
    return _openai_reply(answers, parts[-1].usage)


async def completions(stack: SayingStack, ask: Ask, *, stream: bool) -> Reply:
    """Text completions, with OpenAI's client."""
    schema = _present(response_format=ask.schema and {"type": "json_schema", "json_schema": {"schema": ask.schema}})
    options = _USAGE if stream else None
    fields = _present(stop=ask.stop, n=ask.n, seed=ask.seed, stream_options=options, extra_body=schema)
    create: Any = stack.openai.completions.create
    reply = await create(model=MODEL, prompt=ask.says, max_tokens=ask.max_tokens, stream=stream, **fields)
    answers = [Answer() for _ in range(ask.n or 1)]
    parts = [chunk async for chunk in reply] if stream else [reply]
    for choice in [choice for part in parts for choice in part.choices]:
        answers[choice.index].text += choice.text
        answers[choice.index].reason = choice.finish_reason or answers[choice.index].reason
    return _openai_reply(answers, parts[-1].usage)


async def responses(stack: SayingStack, ask: Ask, *, stream: bool) -> Reply:
    """Responses, with OpenAI's client. What the API has no words for goes by helexa's other names for it."""
    items: list[dict[str, Any]] = [{"role": "user", "content": ask.says}]
    for number, ((name, arguments), result) in enumerate(ask.history):
        call = {"call_id": f"call_{number}", "name": name, "arguments": json.dumps(arguments)}
        items.append({"type": "function_call", **call})
        items.append({"type": "function_call_output", "call_id": f"call_{number}", "output": result})
    fields = _present(
        tools=[{"type": "function", **tool} for tool in ask.tools],
        tool_choice=ask.choice or (ask.forced and {"type": "function", "name": ask.forced}),
        parallel_tool_calls=ask.parallel,
        text=ask.schema and {"format": {"type": "json_schema", "name": "answer", "schema": ask.schema}},
        extra_body=_present(
            stop=ask.stop,
            n=ask.n,
            seed=ask.seed,
            chat_template_kwargs=_present(enable_thinking=ask.thinking),
            thinking_budget=ask.budget,
        ),
    )
    create: Any = stack.openai.responses.create
    reply = await create(model=MODEL, input=items, max_output_tokens=ask.max_tokens, stream=stream, **fields)
    streamed = Answer()
    if stream:
        async for event in reply:
            match event.type:
                case "response.output_text.delta":
                    streamed.text += event.delta
                case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                    streamed.thought += event.delta
                case "response.function_call_arguments.done":
                    streamed.calls.append((event.name, _arguments(event.arguments)))
                case "response.completed" | "response.incomplete":
                    reply = event.response
    answer = Answer(text=reply.output_text)
    for item in reply.output:
        if item.type == "reasoning":
            answer.thought += "".join(part.text for part in item.summary or item.content or ())
        elif item.type == "function_call":
            answer.calls.append((item.name, _arguments(item.arguments)))
            assert item.status == ("incomplete" if answer.calls[-1][1] is None else "completed")
    if stream:  # the deltas and the response at the end say the same
        assert [call for _, call in answer.calls] == [call for _, call in streamed.calls]
        assert streamed == replace(answer, calls=streamed.calls)
    cut = reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    whole = [call for call in answer.calls if call[1] is not None]
    answer.reason = "length" if cut else "tool_calls" if whole else "stop"
    usage = reply.usage
    return Reply([answer], usage.input_tokens, usage.output_tokens, usage.output_tokens_details.reasoning_tokens)


async def messages(stack: SayingStack, ask: Ask, *, stream: bool) -> Reply:
    """Messages, with Anthropic's client."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": ask.says}]
    for number, ((name, arguments), result) in enumerate(ask.history):
        call = {"type": "tool_use", "id": f"call_{number}", "name": name, "input": arguments}
        turns.append({"role": "assistant", "content": [call]})
        block = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": result}
        turns.append({"role": "user", "content": [block]})
    budget = ask.budget or LEAST_BUDGET
    thinking = {True: {"type": "enabled", "budget_tokens": budget}, False: {"type": "disabled"}, None: None}
    choice = {"required": {"type": "any"}, "none": {"type": "none"}, None: None}[ask.choice]
    if ask.parallel is not None:
        choice = {"type": "auto", "disable_parallel_tool_use": not ask.parallel}
    fields = _present(
        tools=[{"input_schema" if key == "parameters" else key: value for key, value in t.items()} for t in ask.tools],
        tool_choice=choice or (ask.forced and {"type": "tool", "name": ask.forced}),
        thinking=thinking[ask.thinking],
        output_config=ask.schema and {"format": {"type": "json_schema", "schema": ask.schema}},
        stop_sequences=[ask.stop] if ask.stop else None,
        extra_body=_present(n=ask.n, seed=ask.seed),
    )
    asked: dict[str, Any] = {"model": MODEL, "messages": turns, "max_tokens": ask.max_tokens, **fields}
    pieces: dict[int, str] = {}
    if stream:
        async with stack.anthropic.messages.stream(**asked) as events:
            async for event in events:
                if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                    pieces[event.index] = pieces.get(event.index, "") + event.delta.partial_json
            message = await events.get_final_message()
    else:
        message = await stack.anthropic.messages.create(**asked)
    answer = Answer()
    for index, block in enumerate(message.content):
        if block.type == "text":
            answer.text += block.text
        elif block.type == "thinking":
            answer.thought += block.thinking
        elif block.type == "tool_use":
            answer.calls.append((block.name, _arguments(pieces[index]) if stream else dict(block.input)))
    reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    answer.reason = reasons[str(message.stop_reason)]
    usage: Any = message.usage
    prompt = usage.input_tokens + usage.cache_read_input_tokens
    details = usage.output_tokens_details
    return Reply([answer], prompt, usage.output_tokens, details.thinking_tokens if details else 0)


DIALECTS: dict[str, Dialect] = {
    "chat": chat,
    "completions": completions,
    "responses": responses,
    "messages": messages,
}
