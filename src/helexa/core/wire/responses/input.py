"""Convert the Responses API's input items to chat messages."""

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
    """Convert a conversation from items of the Responses API to chat messages.

    Consecutive output items of the model (reasoning, a message, tool calls) become one assistant message.

    Most chat templates accept only one system message, at the beginning. The texts of the instructions and of all
    system and developer messages are therefore joined to one system message, with empty lines between them.

    Args:
        instructions: instructions of the request, or None.
        items: items of the conversation.
        known: number of items at the beginning that come from earlier responses. In error messages, number 0 is the
            first item after them.

    Raises:
        ApiError: 400: an item is invalid (`invalid_request_body`) or not supported (`unsupported_parameter`). The
            message names the item.
    """
    conversation = _Conversation(instructions)
    for index, item in enumerate(items, start=-known):
        conversation.add(item, f"input.{index}")
    messages = conversation.messages()
    if not messages:
        raise invalid_body("input: must not be empty", "input")
    return messages


class _Conversation:
    """Builds chat messages from the items of a conversation."""

    def __init__(self, instructions: str | None) -> None:
        self._prompts = [instructions or ""]
        self._messages: list[Message] = []
        self._reasoning: list[str] = []  # reasoning before the next assistant message
        self._assistant_open = False  # the last message is the assistant's, and calls may follow

    def messages(self) -> list[Message]:
        prompt = "\n\n".join([text for text in self._prompts if text])
        return [{"role": "system", "content": prompt}, *self._messages] if prompt else self._messages

    def add(self, item: Item, field: str) -> None:
        match item.get("type") or ("message" if "role" in item else None):
            case "message":
                self._add_message(item, field)
            case "compaction":
                self._prompts.append(f"Summary of the conversation so far:\n{summary_in(item, field)}")
            case "reasoning":
                self._assistant_open = False
                self._reasoning.append(_reasoning_text(item, field))
            case "function_call":
                self._add_call(item, field)
            case "function_call_output":
                content = _content(_output_text(item.get("output")), f"{field}.output")
                self._append({"role": "tool", **_call_id(item, "tool_call_id", field), "content": content})
            case None:
                raise invalid_body(f"{field}: must have a 'type'", field)
            case kind:
                raise unsupported_parameter(field, f"'{field}': items of type {_type_name(kind)} are not supported")

    def _add_message(self, item: Item, field: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise invalid_body(f"{field}.role: must be one of {', '.join(_ROLES)}", f"{field}.role")
        content = _content(item.get("content"), f"{field}.content")
        if role in _SYSTEM_ROLES:
            self._prompts.append(_system_text(content, f"{field}.content"))
        elif role == "assistant":
            follows_call = self._assistant_open and self._messages[-1]["content"] is None  # a call started it
            (self._messages[-1] if follows_call else self._begin_assistant())["content"] = content
        else:
            self._append({"role": role, "content": content})

    def _add_call(self, item: Item, field: str) -> None:
        function = {"name": _string(item, "name", field), "arguments": _arguments(item, field)}
        call = {**_call_id(item, "id", field), "type": "function", "function": function}
        message = self._messages[-1] if self._assistant_open else self._begin_assistant()
        message.setdefault("tool_calls", []).append(call)

    def _begin_assistant(self) -> Message:
        """Append an empty assistant message with the reasoning that precedes it, and return the message."""
        message: Message = {"role": "assistant", "content": None}
        if thoughts := "\n\n".join([text for text in self._reasoning if text]):
            message["reasoning_content"] = thoughts
        self._append(message)
        self._assistant_open = True
        return message

    def _append(self, message: Message) -> None:
        self._reasoning = []  # reasoning without a following answer is dropped
        self._assistant_open = False
        self._messages.append(message)


def _content(value: Any, field: str) -> str | list[Message]:
    """Convert the content of an item to the content of a chat message: a string, or a list of content parts."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid_body(f"{field}: must be a string or a list of parts", field)
    return [_chat_part(part, f"{field}.{index}") for index, part in enumerate(value)]


def _output_text(output: Any) -> Any:
    """Return the output of a function call as content.

    Text and lists are unchanged. Other values are converted to JSON.
    """
    return output if output is None or isinstance(output, str | list) else to_json(output).decode()


def _chat_part(part: Any, field: str) -> Message:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise invalid_body(f"{field}: must be an object with a 'type'", field)
    if kind in _TEXT_PARTS:
        return {"type": "text", "text": _string(part, "text", field)}
    if kind == "refusal":
        return {"type": "refusal", "refusal": _string(part, "refusal", field)}
    if kind == "input_image":
        return _image_part(part, field)
    raise unsupported_parameter(field, f"'{field}': parts of type {_type_name(kind)} are not supported")


def _image_part(part: Mapping[str, Any], field: str) -> Message:
    if part.get("file_id") is not None and part.get("image_url") is None:
        raise unsupported_parameter(f"{field}.file_id", f"'{field}.file_id': helexa stores no files; send a data URL")
    detail = part.get("detail")
    image = {"url": _string(part, "image_url", field), "detail": "high" if detail == "original" else detail}
    return {"type": "image_url", "image_url": {name: value for name, value in image.items() if value is not None}}


def _system_text(content: str | list[Message], field: str) -> str:
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        raise invalid_body(f"{field}: a system message must contain text only", field)
    return "\n".join([part["text"] for part in content])


def _reasoning_text(item: Item, field: str) -> str:
    """Return the text of a reasoning item: its content, or its summary if it has no content.

    Encrypted reasoning of other servers is ignored.
    """
    texts: list[str] = []
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise invalid_body(f"{field}.{name}: must be a list of parts", f"{field}.{name}")
        texts = texts or [_string(part, "text", f"{field}.{name}") for part in parts]
    return "\n\n".join(texts)


def _call_id(item: Item, name: str, field: str) -> Message:
    """Return the id of a call as the field `name`. Without an id, results belong to calls by their order."""
    return {name: _string(item, "call_id", field)} if item.get("call_id") is not None else {}


def _arguments(item: Item, field: str) -> Any:
    """Return the arguments of a call. Some clients send an object in place of its JSON text, or null."""
    arguments = item.get("arguments")
    return arguments if arguments is None or isinstance(arguments, dict) else _string(item, "arguments", field)


def _string(value: Mapping[str, Any], name: str, field: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise invalid_body(f"{field}.{name}: must be a string", f"{field}.{name}")
    return text


def _type_name(kind: Any) -> str:
    return repr(str(kind)[:80])
