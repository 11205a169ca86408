"""Streamed messages in the three API formats."""

from collections.abc import Callable, Iterator

from scripted.script_steps import Call, Json, Say

Wire = Callable[[Say, int], Iterator[Json | str]]
"""Function that returns the events of a step's message; the number makes ids unique."""


def _chat(say: Say, number: int) -> Iterator[Json | str]:
    head = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": 0, "model": "scripted"}

    def chunk(finish: str | None = None, **delta: object) -> Json:
        return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

    yield chunk(role="assistant", content="")
    for piece in _pieces(say.thought):
        yield chunk(reasoning_content=piece)
    for piece in _pieces(say.text):
        yield chunk(content=piece)
    for index, call in enumerate(say.calls):
        begun = {"index": index, "id": _call_id(call, number, index), "type": "function"}
        yield chunk(tool_calls=[begun | {"function": {"name": call.name, "arguments": ""}}])
        for piece in _pieces(call.text):
            yield chunk(tool_calls=[{"index": index, "function": {"arguments": piece}}])
    stop = "tool_calls" if say.calls else "stop"
    yield chunk({"stop": stop, "length": "length", "refusal": "content_filter"}[say.finish])
    prompt, completion = say.tokens
    usage: Json = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    yield head | {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": say.cached}}}
    yield "[DONE]"


def _responses(say: Say, number: int) -> Iterator[Json | str]:
    for count, event in enumerate(_response(say, number)):
        yield event | {"sequence_number": count}


def _response(say: Say, number: int) -> Iterator[Json]:
    response: Json = {"id": f"resp_{number}", "object": "response", "created_at": 0, "model": "scripted"}
    response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    yield {"type": "response.created", "response": response | {"status": "in_progress", "output": []}}
    output: list[Json] = []
    for item, kind, text, whole in _items(say, number):
        is_call = item["type"] == "function_call"
        place = {"output_index": len(output)}
        where = place | {"item_id": item["id"]} | ({} if is_call else {"content_index": 0})
        yield {"type": "response.output_item.added", **place, "item": item | {"status": "in_progress"}}
        for piece in _pieces(text):
            yield {"type": f"response.{kind}.delta", **where, "delta": piece}
        output.append(item | whole | {"status": "completed"})
        yield {"type": f"response.{kind}.done", **where, ("arguments" if is_call else "text"): text}
        yield {"type": "response.output_item.done", **place, "item": output[-1]}
    prompt, completion = say.tokens
    usage: Json = {"input_tokens": prompt, "output_tokens": completion, "total_tokens": prompt + completion}
    usage |= {"input_tokens_details": {"cached_tokens": say.cached}, "output_tokens_details": {"reasoning_tokens": 0}}
    status = "completed" if say.finish == "stop" else "incomplete"
    reason = {"stop": None, "length": "max_output_tokens", "refusal": "content_filter"}[say.finish]
    response |= {"status": status, "incomplete_details": reason and {"reason": reason}, "usage": usage}
    yield {"type": f"response.{status}", "response": response | {"output": output}}


def _items(say: Say, number: int) -> Iterator[tuple[Json, str, str, Json]]:
    """Yield for each output item its first state, the kind of its events, its text, and its final fields."""
    if say.thought:
        content = [{"type": "reasoning_text", "text": say.thought}]
        begun = {"id": f"rs_{number}", "type": "reasoning", "summary": []}
        yield begun, "reasoning_text", say.thought, {"content": content, "encrypted_content": "sealed"}
    if say.text:
        content = [{"type": "output_text", "text": say.text, "annotations": []}]
        begun = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": []}
        yield begun, "output_text", say.text, {"content": content}
    for index, call in enumerate(say.calls):
        begun = {"id": f"fc_{number}_{index}", "type": "function_call", "name": call.name, "arguments": ""}
        begun["call_id"] = _call_id(call, number, index)
        yield begun, "function_call_arguments", call.text, {"arguments": call.text}


def _messages(say: Say, number: int) -> Iterator[Json | str]:
    prompt, completion = say.tokens
    usage = {"input_tokens": prompt - say.cached, "cache_read_input_tokens": say.cached, "output_tokens": 1}
    message: Json = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": "scripted", "content": []}
    message |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": message}
    yield {"type": "ping"}
    for index, (block, deltas) in enumerate(_blocks(say, number)):
        yield {"type": "content_block_start", "index": index, "content_block": block}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stop = "tool_use" if say.calls else "end_turn"
    reason = {"stop": stop, "length": "max_tokens", "refusal": "refusal"}[say.finish]
    delta = {"stop_reason": reason, "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": completion}}
    yield {"type": "message_stop"}


def _blocks(say: Say, number: int) -> Iterator[tuple[Json, list[Json]]]:
    """Yield each content block at its start, with the deltas that follow."""
    if say.thought:
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in _pieces(say.thought)]
        deltas.append({"type": "signature_delta", "signature": "signed"})
        yield {"type": "thinking", "thinking": "", "signature": ""}, deltas
    if say.text:
        yield {"type": "text", "text": ""}, [{"type": "text_delta", "text": piece} for piece in _pieces(say.text)]
    for index, call in enumerate(say.calls):
        begun = {"type": "tool_use", "id": _call_id(call, number, index), "name": call.name, "input": {}}
        yield begun, [{"type": "input_json_delta", "partial_json": piece} for piece in _pieces(call.text)]


def _call_id(call: Call, number: int, index: int) -> str:
    return call.id or f"call_{number}_{index}"


def _pieces(text: str) -> list[str]:
    size = max(7, len(text) // 50)
    return [text[at : at + size] for at in range(0, len(text), size)]


WIRES: dict[str, Wire] = {
    "/v1/chat/completions": _chat,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
}

APIS = dict(zip(("openai-chat", "openai-responses", "anthropic-messages"), WIRES, strict=True))
"""Paths of the API formats by configuration name."""
