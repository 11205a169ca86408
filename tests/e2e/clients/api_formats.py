"""Send one request in each of four API formats with the official clients, and parse the response."""

import json
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from clients.scripted_stack import MODEL, SayingStack

MIN_BUDGET = 1024
"""Anthropic's API accepts no smaller thinking budget, in tokens."""

Call = tuple[str, dict[str, Any] | None]
"""A tool's name and its arguments; the arguments are None if they were truncated."""


@dataclass(frozen=True)
class Request:
    """A request, independent of the API format. Fields that are None or () are not sent.

    Attributes:
        text: the user's message.
        forced: name of the tool that the model must call.
        choice: `required` if the model must call a tool, `none` if it must not.
        parallel: whether the model may call several tools at once.
        history: earlier tool calls with their results.
        thinking: whether the model should think.
        budget: largest number of reasoning tokens.
        schema: JSON schema of the completion.
    """

    text: str
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
class Completion:
    """One completion. `finish` is `stop`, `length` or `tool_calls` in every API format."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    finish: str = ""


@dataclass(frozen=True)
class Result:
    """All completions of a request and their token usage.

    `completion_tokens` includes the reasoning tokens, whose number is `reasoning`.
    """

    completions: list[Completion]
    prompt_tokens: int
    completion_tokens: int
    reasoning: int


class ApiFormat(Protocol):
    """Sends a request in one API format and parses the response."""

    async def __call__(self, stack: SayingStack, request: Request, *, stream: bool) -> Result: ...


_USAGE = {"include_usage": True}


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, (), [], {})}


def _arguments(text: str) -> dict[str, Any] | None:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _openai_reply(completions: list[Completion], usage: Any) -> Result:
    details = usage.completion_tokens_details
    return Result(completions, usage.prompt_tokens, usage.completion_tokens, details.reasoning_tokens if details else 0)


async def chat(stack: SayingStack, request: Request, *, stream: bool) -> Result:
    """Send a chat completion request with OpenAI's client."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": request.text}]
    for number, ((name, arguments), result) in enumerate(request.history):
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
    fields = _present(
        tools=[{"type": "function", "function": tool} for tool in request.tools],
        tool_choice=request.choice or (request.forced and {"type": "function", "function": {"name": request.forced}}),
        parallel_tool_calls=request.parallel,
        response_format=request.schema
        and {"type": "json_schema", "json_schema": {"name": "answer", "schema": request.schema}},
        stop=request.stop,
        n=request.n,
        seed=request.seed,
        stream_options=_USAGE if stream else None,
        extra_body=_present(
            chat_template_kwargs=_present(enable_thinking=request.thinking), thinking_budget=request.budget
        ),
    )
    create: Any = stack.openai.chat.completions.create
    response = await create(model=MODEL, messages=messages, max_tokens=request.max_tokens, stream=stream, **fields)
    completions = [Completion() for _ in range(request.n or 1)]
    call_texts: dict[tuple[int, int], list[str]] = {}
    chunks = [chunk async for chunk in response] if stream else [response]
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        completion, delta = completions[choice.index], choice.delta if stream else choice.message
        completion.text += delta.content or ""
        completion.reasoning += getattr(delta, "reasoning_content", None) or ""
        completion.finish = choice.finish_reason or completion.finish
        for number, call in enumerate(delta.tool_calls or ()):
            arguments_text = call_texts.setdefault((choice.index, call.index if stream else number), [])
            arguments_text += [text for text in (call.function.name, call.function.arguments) if text]
    for (index, _), (name, *texts) in call_texts.items():
        completions[index].calls.append((name, _arguments("".join(texts))))
    return _openai_reply(completions, chunks[-1].usage)


async def completions(stack: SayingStack, request: Request, *, stream: bool) -> Result:
    """Send a text completion request with OpenAI's client."""
    schema = _present(
        response_format=request.schema and {"type": "json_schema", "json_schema": {"schema": request.schema}}
    )
    options = _USAGE if stream else None
    fields = _present(stop=request.stop, n=request.n, seed=request.seed, stream_options=options, extra_body=schema)
    create: Any = stack.openai.completions.create
    response = await create(model=MODEL, prompt=request.text, max_tokens=request.max_tokens, stream=stream, **fields)
    completions = [Completion() for _ in range(request.n or 1)]
    chunks = [chunk async for chunk in response] if stream else [response]
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        completions[choice.index].text += choice.text
        completions[choice.index].finish = choice.finish_reason or completions[choice.index].finish
    return _openai_reply(completions, chunks[-1].usage)


async def responses(stack: SayingStack, request: Request, *, stream: bool) -> Result:
    """Send a Responses request with OpenAI's client. Fields that the API lacks are sent under helexa's names."""
    items: list[dict[str, Any]] = [{"role": "user", "content": request.text}]
    for number, ((name, arguments), result) in enumerate(request.history):
        call = {"call_id": f"call_{number}", "name": name, "arguments": json.dumps(arguments)}
        items.append({"type": "function_call", **call})
        items.append({"type": "function_call_output", "call_id": f"call_{number}", "output": result})
    fields = _present(
        tools=[{"type": "function", **tool} for tool in request.tools],
        tool_choice=request.choice or (request.forced and {"type": "function", "name": request.forced}),
        parallel_tool_calls=request.parallel,
        text=request.schema and {"format": {"type": "json_schema", "name": "answer", "schema": request.schema}},
        extra_body=_present(
            stop=request.stop,
            n=request.n,
            seed=request.seed,
            chat_template_kwargs=_present(enable_thinking=request.thinking),
            thinking_budget=request.budget,
        ),
    )
    create: Any = stack.openai.responses.create
    response = await create(model=MODEL, input=items, max_output_tokens=request.max_tokens, stream=stream, **fields)
    streamed = Completion()
    if stream:
        async for event in response:
            match event.type:
                case "response.output_text.delta":
                    streamed.text += event.delta
                case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                    streamed.reasoning += event.delta
                case "response.function_call_arguments.done":
                    streamed.calls.append((event.name, _arguments(event.arguments)))
                case "response.completed" | "response.incomplete":
                    response = event.response
    completion = Completion(text=response.output_text)
    for item in response.output:
        if item.type == "reasoning":
            completion.reasoning += "".join(part.text for part in item.summary or item.content or ())
        elif item.type == "function_call":
            completion.calls.append((item.name, _arguments(item.arguments)))
            assert item.status == ("incomplete" if completion.calls[-1][1] is None else "completed")
    if stream:  # the deltas and the final response must agree
        assert [call for _, call in completion.calls] == [call for _, call in streamed.calls]
        assert streamed == replace(completion, calls=streamed.calls)
    cut = response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    complete_calls = [call for call in completion.calls if call[1] is not None]
    completion.finish = "length" if cut else "tool_calls" if complete_calls else "stop"
    usage = response.usage
    return Result([completion], usage.input_tokens, usage.output_tokens, usage.output_tokens_details.reasoning_tokens)


async def messages(stack: SayingStack, request: Request, *, stream: bool) -> Result:
    """Send a Messages request with Anthropic's client."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": request.text}]
    for number, ((name, arguments), result) in enumerate(request.history):
        call = {"type": "tool_use", "id": f"call_{number}", "name": name, "input": arguments}
        turns.append({"role": "assistant", "content": [call]})
        block = {"type": "tool_result", "tool_use_id": f"call_{number}", "content": result}
        turns.append({"role": "user", "content": [block]})
    budget = request.budget or MIN_BUDGET
    thinking = {True: {"type": "enabled", "budget_tokens": budget}, False: {"type": "disabled"}, None: None}
    choice = {"required": {"type": "any"}, "none": {"type": "none"}, None: None}[request.choice]
    if request.parallel is not None:
        choice = {"type": "auto", "disable_parallel_tool_use": not request.parallel}
    fields = _present(
        tools=[
            {"input_schema" if key == "parameters" else key: value for key, value in t.items()} for t in request.tools
        ],
        tool_choice=choice or (request.forced and {"type": "tool", "name": request.forced}),
        thinking=thinking[request.thinking],
        output_config=request.schema and {"format": {"type": "json_schema", "schema": request.schema}},
        stop_sequences=[request.stop] if request.stop else None,
        extra_body=_present(n=request.n, seed=request.seed),
    )
    options: dict[str, Any] = {"model": MODEL, "messages": turns, "max_tokens": request.max_tokens, **fields}
    arguments_text: dict[int, str] = {}
    if stream:
        async with stack.anthropic.messages.stream(**options) as events:
            async for event in events:
                if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                    arguments_text[event.index] = arguments_text.get(event.index, "") + event.delta.partial_json
            message = await events.get_final_message()
    else:
        message = await stack.anthropic.messages.create(**options)
    completion = Completion()
    for index, block in enumerate(message.content):
        if block.type == "text":
            completion.text += block.text
        elif block.type == "thinking":
            completion.reasoning += block.thinking
        elif block.type == "tool_use":
            completion.calls.append((block.name, _arguments(arguments_text[index]) if stream else dict(block.input)))
    reasons = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
    completion.finish = reasons[str(message.stop_reason)]
    usage: Any = message.usage
    prompt = usage.input_tokens + usage.cache_read_input_tokens
    details = usage.output_tokens_details
    return Result([completion], prompt, usage.output_tokens, details.thinking_tokens if details else 0)


API_FORMATS: dict[str, ApiFormat] = {
    "chat": chat,
    "completions": completions,
    "responses": responses,
    "messages": messages,
}
