"""The input items of the Responses API, and their conversion to chat messages.

A conversation that began at another server may contain items of tools which are not functions: custom, local and hosted
tools. A call becomes a tool call of the assistant, and the output becomes a tool message. Items that a model cannot use
without the state of the other server are dropped.

The summary of a compacted conversation is an item whose encoding is opaque to clients.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
from pydantic_core import PydanticCustomError, to_json

from helexa.core.errors import invalid_body, unsupported_parameter
from helexa.core.wire.responses_output import response_of

_MARK = "helexa1."

# Types of calls of hosted tools that are shown to the model, with the name of the field that has the input.
_INPUTS = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "code_interpreter_call": "code",
    "mcp_call": "arguments",
}

_OUTPUTS = tuple(f"{kind}_output" for kind in _INPUTS)

# Types of items that add tools to the request. Codex sends `additional_tools` for some models, and `tool_search_output`
# after a search for tools that the model of another server has requested.
TOOL_ITEMS = ("additional_tools", "tool_search_output")

_DROPPED = (
    *TOOL_ITEMS,
    "agent_reasoning",
    "web_search_call",
    "file_search_call",
    "tool_search_call",
    "image_generation_call",
    "computer_call",
    "computer_call_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
)

_PARTS = ("input_text", "output_text", "text", "input_image")

HOSTED_ITEMS = frozenset({*_INPUTS, *_OUTPUTS, *_DROPPED})  # types of all items of tools that are not functions

Item = Mapping[str, Any]
Message = dict[str, Any]

_SYSTEM_ROLES = ("system", "developer")
_ROLES = ("user", "assistant", *_SYSTEM_ROLES)
_TEXT_PARTS = ("input_text", "output_text", "text")


def input_items(value: Any) -> list[dict[str, Any]]:
    """Return the field `input` as a list of items. A string becomes a user message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("input", "the input must be a string or a list of at least one item")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise PydanticCustomError("input", "item {index} of the input is not an object", {"index": index})
    return value


def compaction_item(id: str, summary: str) -> dict[str, str]:
    """Return an input item of type `compaction`, with `id` and `summary`."""
    content = _MARK + base64.urlsafe_b64encode(summary.encode()).decode()
    return {"type": "compaction", "id": id, "encrypted_content": content}


def _summary_in(item: Mapping[str, Any], field: str) -> str:
    """Return the summary in a `compaction` item.

    `field` is the JSON path of the item, used in the error message.

    Raises:
        ApiError: 400 `invalid_request_body`: the item was not created by `compaction_item`.
    """
    content = item.get("encrypted_content")
    if isinstance(content, str) and content.startswith(_MARK):
        try:
            return base64.urlsafe_b64decode(content[len(_MARK) :]).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError):
            pass
    name = f"{field}.encrypted_content"
    raise invalid_body(
        f"{name}: was not written by this server; send the item as /v1/responses/compact returned it", name
    )


@dataclass(frozen=True)
class HostedCall:
    """The call and the output that the model is shown for an item of a hosted tool."""

    name: str | None = None  # name of the tool, or None if the item has no call
    arguments: dict[str, Any] | str | None = None  # arguments of the call, as an object or its JSON text
    output: str | list[Any] | None = None  # output of the tool as content, or None if the item has no output


def hosted_call(kind: str, item: Mapping[str, Any]) -> HostedCall | None:
    """Return the call or output in a hosted tool's item; None if the item is dropped.

    `kind`, the type of the item, must be in `HOSTED_ITEMS`.
    """
    if kind in _DROPPED:
        return None
    if kind in _OUTPUTS:
        return HostedCall(output=_output(item.get("output")))
    field = _INPUTS[kind]
    name = item.get("name")
    tool = name if isinstance(name, str) and name else kind.removesuffix("_call")
    output = item.get("output", item.get("outputs"))
    if item.get("error"):
        output = item["error"]
    return HostedCall(tool, _hosted_arguments(field, item.get(field)), None if output is None else _output(output))


def _hosted_arguments(field: str, value: Any) -> dict[str, Any] | str:
    """Return the input of a call as an object, or as the JSON text of an object."""
    if field == "arguments" and isinstance(value, str):
        return value
    return value if isinstance(value, dict) else {field: value if isinstance(value, str) else _as_text(value)}


def _output(value: Any) -> str | list[Any]:
    """Return a tool's output as text, or unchanged if it is a list of content parts."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") in _PARTS for part in value):
        return value
    return value if isinstance(value, str) else _as_text(value)


def _as_text(value: Any) -> str:
    return "" if value is None else to_json(value, inf_nan_mode="null").decode()


def name_in_chat(names: Mapping[tuple[str | None, str], str], namespace: Any, name: str) -> str:
    """Return a called function's name in the chat: from `names`, else `name` itself."""
    return names.get((namespace, name), name) if isinstance(namespace, str | None) else name


def chat_messages(
    instructions: str | None,
    items: Sequence[Item],
    names: Mapping[tuple[str | None, str], str] = MappingProxyType({}),
    *,
    known: int = 0,
) -> list[Message]:
    """Convert a conversation from items of the Responses API to chat messages.

    Consecutive output items of the model (reasoning, a message, tool calls) become one assistant message.

    Most chat templates accept only one system message, at the beginning. The texts of the instructions and of all
    system and developer messages are therefore joined to one system message, with empty lines between them.

    Args:
        names: names of functions in the chat, by namespace and name.
        known: number of items at the beginning that come from earlier responses. In error messages, number 0 is the
            first item after them.

    Raises:
        ApiError: 400: an item is invalid (`invalid_request_body`) or not supported (`unsupported_parameter`). The
            message names the item.
    """
    conversation = _Conversation(instructions, names)
    for index, item in enumerate(items, start=-known):
        conversation.add(item, f"input.{index}")
    messages = conversation.messages()
    if not messages:
        raise invalid_body("input: must not be empty", "input")
    return messages


class _Conversation:
    """Builds chat messages from the items of a conversation."""

    def __init__(self, instructions: str | None, names: Mapping[tuple[str | None, str], str]) -> None:
        self._names = names
        self._prompts = [instructions or ""]
        self._messages: list[Message] = []
        self._reasoning: list[str] = []  # reasoning before the next assistant message
        self._assistant_open = False  # whether the last message is the assistant's, and calls may be added to it

    def messages(self) -> list[Message]:
        prompt = "\n\n".join([text for text in self._prompts if text])
        return [{"role": "system", "content": prompt}, *self._messages] if prompt else self._messages

    def add(self, item: Item, field: str) -> None:
        match item.get("type") or ("message" if "role" in item else None):
            case "message":
                self._add_message(item, field)
            case "agent_message":
                self._append({"role": "user", "content": _agent_text(item, field)})
            case "compaction":
                self._prompts.append(f"Summary of the conversation so far:\n{_summary_in(item, field)}")
            case "reasoning":
                self._assistant_open = False
                self._reasoning.append(_reasoning_text(item, field))
            case "function_call":
                self._add_call(item, field)
            case "function_call_output":
                content = _content(_output_text(item.get("output")), f"{field}.output")
                self._append({"role": "tool", **_call_id(item, "tool_call_id", field), "content": content})
            case str() as kind if kind in HOSTED_ITEMS:
                self._add_hosted(kind, item, field)
            case None:
                raise invalid_body(f"{field}: must have a 'type'", field)
            case kind:
                message = f"'{field}': items of type {_type_name(kind)} are not supported; leave the item out"
                raise unsupported_parameter(field, message)

    def _add_message(self, item: Item, field: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise invalid_body(
                f"{field}.role: must be one of {', '.join(_ROLES)}, not {str(role)[:80]!r}", f"{field}.role"
            )
        content = _content(item.get("content"), f"{field}.content")
        if role in _SYSTEM_ROLES:
            self._prompts.append(_system_text(content, f"{field}.content"))
        elif role == "assistant":
            follows_call = self._assistant_open and self._messages[-1]["content"] is None  # a call began the message
            (self._messages[-1] if follows_call else self._begin_assistant())["content"] = content
        else:
            self._append({"role": role, "content": content})

    def _add_call(self, item: Item, field: str) -> None:
        name = name_in_chat(self._names, item.get("namespace"), _string(item, "name", field))
        function = {"name": name, "arguments": _arguments(item, field)}
        call = {**_call_id(item, "id", field), "type": "function", "function": function}
        message = self._messages[-1] if self._assistant_open else self._begin_assistant()
        message.setdefault("tool_calls", []).append(call)

    def _add_hosted(self, kind: str, item: Item, field: str) -> None:
        """Add an item of a tool that is not a function.

        Items without content that a model can read are dropped.
        """
        hosted = hosted_call(kind, item)
        if hosted is None:
            return
        call_id = _call_id(item if item.get("call_id") is not None else {"call_id": item.get("id")}, "id", field)
        if hosted.name is not None:
            name = name_in_chat(self._names, item.get("namespace"), hosted.name)
            function = {"name": name, "arguments": hosted.arguments}
            message = self._messages[-1] if self._assistant_open else self._begin_assistant()
            message.setdefault("tool_calls", []).append({**call_id, "type": "function", "function": function})
        if hosted.output is not None:
            content = _content(hosted.output, f"{field}.output")
            named = {"tool_call_id": call_id["id"]} if "id" in call_id else {}
            self._append({"role": "tool", **named, "content": content})

    def _begin_assistant(self) -> Message:
        """Append an empty assistant message with the preceding reasoning; return it."""
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
    """Convert the content of an item to the content of a chat message."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid_body(f"{field}: must be a string or a list of parts", field)
    return [_chat_part(part, f"{field}.{index}") for index, part in enumerate(value)]


def _agent_text(item: Item, field: str) -> str:
    """Return the text of a message between agents, with its sender and receiver."""
    content = item.get("content")
    parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
    values = [part.get("text") for part in parts if isinstance(part, dict)]
    texts = [value for value in values if isinstance(value, str)]
    if not texts:
        raise invalid_body(f"{field}.content: must contain text", f"{field}.content")
    names = [str(item.get(name)) for name in ("author", "recipient")]
    return f"Message from {names[0]} to {names[1]}:\n" + "\n".join(texts)


def _output_text(output: Any) -> Any:
    """Return a function call's output: text and lists unchanged, other values as JSON."""
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
    message = f"'{field}': parts of type {_type_name(kind)} are not supported; send text or images"
    raise unsupported_parameter(field, message)


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
    """Return the text of a reasoning item: its content, or else its summary."""
    texts: list[str] = []
    # Encrypted reasoning of other servers cannot be read here.
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise invalid_body(f"{field}.{name}: must be a list of parts", f"{field}.{name}")
        texts = texts or [_string(part, "text", f"{field}.{name}") for part in parts]
    return "\n\n".join(texts)


def _call_id(item: Item, name: str, field: str) -> Message:
    """Return a dict with the id of a call as the field `name`; empty without an id."""
    # If calls and outputs have no ids, their order shows which of them belong together.
    return {name: _string(item, "call_id", field)} if item.get("call_id") is not None else {}


def _arguments(item: Item, field: str) -> Any:
    """Return the arguments of the call `item`: an object, its JSON text, or None."""
    # Some clients send an object in place of its JSON text, or null.
    arguments = item.get("arguments")
    return arguments if arguments is None or isinstance(arguments, dict) else _string(item, "arguments", field)


def _string(value: Mapping[str, Any], name: str, field: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise invalid_body(f"{field}.{name}: must be a string", f"{field}.{name}")
    return text


def _type_name(kind: Any) -> str:
    return repr(str(kind)[:80])


class _Reference(msgspec.Struct):
    type: Any = None
    id: Any = None
    role: Any = None


_items = msgspec.json.Decoder(list[_Reference])


def referenced_response(previous: Any, input: msgspec.Raw) -> str | None:
    """Return the id of the stored response that a request refers to.

    Return None if the request refers to no stored response. If a list `input` cannot be decoded, return an id that no
    response has.

    Args:
        previous: the field `previous_response_id`.
        input: the field `input`, which may contain references to items of stored responses.
    """
    if isinstance(previous, str):
        return previous
    if memoryview(input)[:1] != b"[":
        return None
    try:
        items = _items.decode(input)
    except msgspec.DecodeError:
        # The node accepts JSON that msgspec rejects, for example with the number 1e999. Such JSON may contain
        # references, so the result is not None, but an id that no response has.
        return response_of("")
    references = (item.id for item in items if item.type in (None, "item_reference") and item.role is None)
    return next((response_of(id) for id in references if isinstance(id, str)), None)
