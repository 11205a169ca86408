"""Convert messages from OpenAI's chat format to the format that a model's chat template reads.

`transformers` leaves most of this conversion to its callers. The rules are:

* Fields with null values are omitted. Reasoning is copied to `reasoning_content` and `thinking`, as in `transformers`.
* The arguments of tool calls are JSON text in OpenAI's format. They are converted to objects, unless the template needs
  text.
* In a message with tool calls, null content is omitted. If the template cannot render such a message without content,
  the content stays null. If the template cannot render null either, the content becomes empty text.
* In a message without tool calls, null content becomes empty text.
* A list of text parts becomes one text with one part per line, unless the template supports lists in messages of this
  role.

The module renders short test conversations to detect the requirements of a template.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from helexa.neuron.text.templates.template_renderer import TemplateError

Message = Mapping[str, Any]
Attempt = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str | None]
"""Function that renders messages and tools with the template. It returns the text, or None if rendering fails."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "thinking", "reasoning")

_ABSENT = {}
_NULL = {"content": None}
_EMPTY = {"content": ""}

_USER = {"role": "user", "content": "trial message"}
_MARK = "trial mark"
_RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "trial_tool", "content": "result"}
_PARTS = [{"type": "text", "text": text} for text in ("trial part", "trial rest")]
_TOOL = {
    "type": "function",
    "function": {
        "name": "trial_tool",
        "description": "trial",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "key"}}},
    },
}


class MessageShaper:
    """Converts messages to the format that one chat template reads.

    Args:
        attempt: function that renders a test conversation with the template.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._parts_support: dict[str, bool] = {}

    def shaped(self, message: Message) -> dict[str, Any]:
        """Return a copy of `message` in the format of the template.

        Raises:
            TemplateError: the message has an image and the template supports only text.
        """
        shaped = {key: value for key, value in message.items() if value is not None}
        reasoning = next((shaped[key] for key in _REASONING if key in shaped), None)
        if reasoning is not None:
            shaped = {"thinking": reasoning} | shaped | {"reasoning_content": reasoning}
        calls = shaped.get("tool_calls")
        calls = calls if isinstance(calls, list) else []
        if calls:
            shaped["tool_calls"] = [self._shaped_call(call) for call in calls]
        content = shaped.get("content")
        if content is None:
            shaped |= self._call_shape[0] if calls else _EMPTY
        elif isinstance(content, list) and not self._supports_parts(shaped.get("role")):
            shaped["content"] = _join_text_parts(content)
        return shaped

    def _shaped_call(self, call: Any) -> Any:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            return call
        if "arguments" not in call["function"]:
            return call
        arguments = call["function"]["arguments"]
        if self._call_shape[1]:
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        else:
            arguments = _parse_arguments(arguments)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _supports_parts(self, role: Any) -> bool:
        """Return whether the template renders messages of `role` whose content is a list of text parts."""
        name = role if role in _ROLES else "user"
        if name not in self._parts_support:
            self._parts_support[name] = self._try_parts(name)
        return self._parts_support[name]

    def _try_parts(self, role: str) -> bool:
        turn = {"role": role, "content": _PARTS}
        preceding, following = [], []
        if role == "tool":
            preceding = [_USER, _call_turn(*self._call_shape)]
            turn = _RESULT | turn
        elif role == "assistant":
            preceding = [_USER]
        elif role != "user":
            following = [_USER]
        text = self._attempt([*preceding, turn, *following], None) or ""
        return all(text.count(part["text"]) == 1 for part in _PARTS) and "'type'" not in text and '"type"' not in text

    @cached_property
    def _call_shape(self) -> tuple[dict[str, Any], bool]:
        """The form in which the template expects an assistant message that has tool calls and no text.

        The first value is the content field of this message: absent, null or empty text. The second value is whether
        the arguments of tool calls must be JSON text instead of an object.
        """
        plain = self._attempt([_USER], [_TOOL]) or ""
        for as_text in (False, True):
            for content in (_ABSENT, _NULL, _EMPTY):
                text = self._attempt([_USER, _call_turn(content, as_text), _RESULT], [_TOOL]) or ""
                if _MARK in text and text.count("None") == plain.count("None"):
                    return content, as_text
        return _EMPTY, False


def _call_turn(content: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Return an assistant message for a test conversation, with a call of the test tool.

    Args:
        content: the content field of the message. An empty dict omits the field.
        as_text: whether the arguments are JSON text instead of an object.
    """
    arguments = {"key": _MARK}
    function = {"name": "trial_tool", "arguments": json.dumps(arguments) if as_text else arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", **content, "tool_calls": [call]}


def _join_text_parts(parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else None
            raise TemplateError(f"the chat template supports only text, not a content part of type '{str(kind)[:80]}'")
    return "\n".join(texts)


def _parse_arguments(arguments: Any) -> Any:
    """Return the object in the JSON text `arguments` of a tool call. Empty text means an empty object.

    A value that is not the JSON text of an object is returned unchanged.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
