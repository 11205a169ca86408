"""A quirk: what a backend answers to a chat request, and what a client must see of the answer."""

import json
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]
"""Name and arguments of a tool call."""

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Seen:
    """What a client sees of an answer, in any API format.

    Attributes:
        text: the text of the answer.
        reasoning: the reasoning before the text.
        calls: the tool calls.
        end: finish reason in OpenAI's chat format, or `error` if the answer must end with an error.
        usage: prompt and completion tokens. None if the backend reports none, so the gateway must estimate them.
        error: text that the error message must contain.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    end: str = "stop"
    usage: tuple[int, int] | None = None
    error: str = ""


@dataclass(frozen=True)
class Quirk:
    """One way in which the chat completions of a backend differ from OpenAI's specification.

    Attributes:
        backend: the server that is known for this behavior.
        name: description of the behavior.
        seen: what a client must see.
        stream: pieces of the body that the backend answers to a streaming request; empty to test no stream.
        whole: the body that the backend answers to another request; None to test none.
        media_type: value of the `Content-Type` header of the answer; empty for no header.
        status: HTTP status of the answer.
        breaks: True if the backend closes the connection in the middle of the answer.
    """

    backend: str
    name: str
    seen: Seen
    stream: tuple[bytes, ...] = ()
    whole: bytes | None = None
    media_type: str | None = None
    status: int = 200
    breaks: bool = False

    def __str__(self) -> str:
        return f"{self.backend}: {self.name}"


def event(value: Any) -> bytes:
    """Return a server-sent event with `value` as JSON. NaN is written as `NaN`, as Python's JSON module does."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def chunk(choice: Any, **fields: Any) -> bytes:
    """Return a chunk with one choice."""
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event(head | {"choices": [{"index": 0} | choice]} | fields)


def delta(**fields: Any) -> bytes:
    """Return a chunk with the delta `fields` and no finish reason."""
    return chunk({"delta": fields, "finish_reason": None})


def call(index: int | None = None, name: str | None = None, arguments: Any = "", id: str | None = None) -> bytes:
    """Return a chunk with one delta of a tool call. An argument of None leaves its field out."""
    function = {"name": name, "arguments": arguments}
    value: dict[str, Any] = {"function": {key: given for key, given in function.items() if given is not None}}
    value |= {key: given for key, given in (("index", index), ("id", id)) if given is not None}
    return delta(tool_calls=[value])


def finish(reason: Any = "stop", **fields: Any) -> bytes:
    """Return a chunk with an empty delta and a finish reason."""
    return chunk({"delta": {}, "finish_reason": reason}, **fields)


def usage_chunk(usage: Any, **fields: Any) -> bytes:
    """Return a chunk with `usage`. It has no choices unless `fields` set them."""
    return event({"id": "c1", "object": "chat.completion.chunk", "choices": [], "usage": usage} | fields)


def completion(message: Any, reason: Any = "stop", usage: Any = None, **fields: Any) -> bytes:
    """Return the body of a whole chat completion."""
    head = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m"}
    choice = {"index": 0, "message": {"role": "assistant"} | message, "finish_reason": reason}
    return json.dumps(head | {"choices": [choice]} | ({} if usage is None else {"usage": usage}) | fields).encode()


def tool_call(name: str, arguments: Any, **fields: Any) -> dict[str, Any]:
    """Return a tool call of a whole answer."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}} | fields


def counts(prompt: Any = 7, completion: Any = 2) -> dict[str, Any]:
    """Return the token counts of an answer in OpenAI's format."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 9}
