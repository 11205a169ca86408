"""Builders of chat completion chunks, as nodes stream them."""

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event({"id": "c1", "model": "Org/M", "choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def text_chunk(text: str) -> bytes:
    return delta(content=text)


def thinking_chunk(text: str) -> bytes:
    return delta(reasoning_content=text)


def calls(*deltas: Any) -> bytes:
    return delta(tool_calls=list(deltas))


def call_delta(
    index: int | None, arguments: Any = "", *, name: str | None = None, id: str | None = None
) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name is not None else {})
    numbered = {} if index is None else {"index": index}
    return numbered | {"function": function} | ({"id": id, "type": "function"} if id is not None else {})


def finish(reason: str = "stop", **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason, **fields}]})


def usage(prompt: int, completion: int, **fields: Any) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **fields}})


FIRST = ("call_1", "Bash", {"command": "ls"})
SECOND = ("call_2", "Read", {"file_path": "/a", "lines": [1, 2]})


def call_deltas(index: int | None, call: tuple[str, str, Any], size: int = 7) -> list[dict[str, Any]]:
    text = json.dumps(call[2])
    fragments = [text[at : at + size] for at in range(0, len(text), size)]
    return [call_delta(index, "", name=call[1], id=call[0]), *(call_delta(index, fragment) for fragment in fragments)]


SEQUENTIAL = [*call_deltas(0, FIRST), *call_deltas(1, SECOND)]
INTERLEAVED = [
    deltas[at] for at in range(9) for deltas in (call_deltas(0, FIRST), call_deltas(1, SECOND)) if at < len(deltas)
]

ROLE = delta(role="assistant", content="")
CACHED = {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 1}}
