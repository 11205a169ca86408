"""What OpenAI's Responses take as input: items, and the conversation of chat messages that they are."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from helexa.core.errors import invalid_body, unsupported_parameter
from helexa.core.wire.responses.compaction_item import summary_in

Item = Mapping[str, Any]
Message = dict[str, Any]

_SYSTEM_ROLES = ("system", "developer")
_ROLES = ("user", "assistant", *_SYSTEM_ROLES)
_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_messages(instructions: str | None, items: Sequence[Item], *, known: int = 0) -> list[Message]:
    """A conversation in the shape of chat completions.

    What the model said in one go, its reasoning, a message and calls, is one turn. All system text is one leading
    message, as most templates want it: the instructions, then what system and developer say, between empty lines.

    Args:
        known: how many of the items, the first, are from responses before this one; errors count from there.

    Raises:
        ApiError: 400 `invalid_request_body` or 400 `unsupported_parameter`, naming the item.
    """
    conversation = _Conversation(instructions)
    for index, item in enumerate(items, start=-known):
        conversation.add(item, f"input.{index}")
    messages = conversation.messages()
    if not messages:
        raise invalid_body("input: must say something", "input")
    return messages


class _Conversation:
    """Takes items, gives messages."""

    def __init__(self, instructions: str | None) -> None:
        self._prompts = [instructions or ""]
        self._turns: list[Message] = []
        self._reasoning: list[str] = []  # of a turn that has not begun
        self._answering = False  # the last turn is the assistant's, and may have calls yet

    def messages(self) -> list[Message]:
        prompt = "\n\n".join([text for text in self._prompts if text])
        return [{"role": "system", "content": prompt}, *self._turns] if prompt else self._turns

    def add(self, item: Item, field: str) -> None:
        match item.get("type") or ("message" if "role" in item else None):
            case "message":
                self._message(item, field)
            case "compaction":
                self._prompts.append(f"Summary of the conversation so far:\n{summary_in(item, field)}")
            case "reasoning":
                self._answering = False
                self._reasoning.append(_reasoning_text(item, field))
            case "function_call":
                self._call(item, field)
            case "function_call_output":
                content = _content(_spelled(item.get("output")), f"{field}.output")
                self._say({"role": "tool", "tool_call_id": _string(item, "call_id", field), "content": content})
            case None:
                raise invalid_body(f"{field}: must have a 'type'", field)
            case kind:
                raise unsupported_parameter(field, f"'{field}': items of type {_named(kind)} are not supported")

    def _message(self, item: Item, field: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise invalid_body(f"{field}.role: must be one of {', '.join(_ROLES)}", f"{field}.role")
        content = _content(item.get("content"), f"{field}.content")
        if role in _SYSTEM_ROLES:
            self._prompts.append(_system_text(content, f"{field}.content"))
        elif role == "assistant":
            lacks_content = self._answering and self._turns[-1]["content"] is None  # with a call
            (self._turns[-1] if lacks_content else self._answer())["content"] = content
        else:
            self._say({"role": role, "content": content})

    def _call(self, item: Item, field: str) -> None:
        function = {"name": _string(item, "name", field), "arguments": _string(item, "arguments", field)}
        call = {"id": _string(item, "call_id", field), "type": "function", "function": function}
        message = self._turns[-1] if self._answering else self._answer()
        message.setdefault("tool_calls", []).append(call)

    def _answer(self) -> Message:
        """A new turn of the assistant's, with the reasoning that came before it."""
        message: Message = {"role": "assistant", "content": None}
        if reasoning := "\n\n".join([text for text in self._reasoning if text]):
            message["reasoning_content"] = reasoning
        self._say(message)
        self._answering = True
        return message

    def _say(self, turn: Message) -> None:
        self._reasoning = []  # what nothing came of is of no use
        self._answering = False
        self._turns.append(turn)


def _content(value: Any, field: str) -> str | list[Message]:
    """Text, or parts as chat completions have them."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid_body(f"{field}: must be a string or a list of parts", field)
    return [_part(part, f"{field}.{index}") for index, part in enumerate(value)]


def _spelled(output: Any) -> Any:
    """What a function gave back, as JSON unless it is text or parts."""
    return output if output is None or isinstance(output, str | list) else to_json(output).decode()


def _part(part: Any, field: str) -> Message:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid_body(f"{field}: must be an object with a 'type'", field)
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": _string(part, "text", field)}
    if kind == "refusal":
        return {"type": "refusal", "refusal": _string(part, "refusal", field)}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), "detail": part.get("detail")}}
    raise unsupported_parameter(field, f"'{field}': parts of type {_named(kind)} are not supported")


def _system_text(content: str | list[Message], field: str) -> str:
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise invalid_body(f"{field}: a system message is made of text", field)
    return "\n".join([part["text"] for part in content])


def _reasoning_text(item: Item, field: str) -> str:
    """What can be read of it: the reasoning itself, else its summary. Encrypted reasoning is somebody else's."""
    texts: list[str] = []
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise invalid_body(f"{field}.{name}: must be a list of parts", f"{field}.{name}")
        texts = texts or [_string(part, "text", f"{field}.{name}") for part in parts]
    return "\n\n".join(texts)


def _string(value: Mapping[str, Any], name: str, field: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise invalid_body(f"{field}.{name}: must be a string", f"{field}.{name}")
    return text


def _named(kind: Any) -> str:
    return repr(str(kind)[:80])
