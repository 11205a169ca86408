"""Messages as OpenAI's chat API has them, put into the shape that a chat template reads.

`transformers` leaves most of this to its callers. What a caller of it would do is done here:

* fields that are null are left out, and reasoning is there under each of its names (as `transformers` does itself);
* tool call arguments, which OpenAI has as JSON text, are objects, unless the template can only take text;
* a tool call whose content is null has none, unless the template fails on that or shows the call only beside null or
  empty content; elsewhere null content is empty text;
* a list of text parts is one text, a part per line, unless the template takes lists in turns of that role.

What a template takes is found out by trying.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from helexa.neuron.text.templates.template_renderer import TemplateError

Message = Mapping[str, Any]
Attempt = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str | None]
"""From messages and tools to the text that the template makes of them, or None where it fails."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONING = ("reasoning_content", "thinking", "reasoning")

_ABSENT = {}
_NULL = {"content": None}
_EMPTY = {"content": ""}

_USER = {"role": "user", "content": "question"}
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
    """Shapes messages for one template.

    Args:
        attempt: renders a trial.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._parts_taken: dict[str, bool] = {}

    def shaped(self, message: Message) -> dict[str, Any]:
        """The message as the template reads it; `message` stays as it is.

        Raises:
            TemplateError: when it has an image and the template only takes text.
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
        elif isinstance(content, list) and not self._takes_parts(shaped.get("role")):
            shaped["content"] = _joined(content)
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
            arguments = _parsed(arguments)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _takes_parts(self, role: Any) -> bool:
        """Whether lists of parts come out as their text in such a turn."""
        name = role if role in _ROLES else "user"
        if name not in self._parts_taken:
            self._parts_taken[name] = self._tries_parts(name)
        return self._parts_taken[name]

    def _tries_parts(self, role: str) -> bool:
        turn = {"role": role, "content": _PARTS}
        before, after = [], []
        if role == "tool":
            before = [_USER, _calling(*self._call_shape)]
            turn = _RESULT | turn
        elif role == "assistant":
            before = [_USER]
        elif role != "user":
            after = [_USER]
        text = self._attempt([*before, turn, *after], None) or ""
        return all(text.count(part["text"]) == 1 for part in _PARTS) and "'type'" not in text and '"type"' not in text

    @cached_property
    def _call_shape(self) -> tuple[dict[str, Any], bool]:
        """The content of a tool call that has none, and whether its arguments must be text."""
        plain = self._attempt([_USER], [_TOOL]) or ""
        for as_text in (False, True):
            for content in (_ABSENT, _NULL, _EMPTY):
                text = self._attempt([_USER, _calling(content, as_text), _RESULT], [_TOOL]) or ""
                if _MARK in text and text.count("None") == plain.count("None"):
                    return content, as_text
        return _EMPTY, False


def _calling(content: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """A turn that calls a tool."""
    arguments = {"key": _MARK}
    function = {"name": "trial_tool", "arguments": json.dumps(arguments) if as_text else arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", **content, "tool_calls": [call]}


def _joined(parts: Sequence[Any]) -> str:
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else None
            raise TemplateError(f"the chat template takes text only, not a part of type '{str(kind)[:80]}'")
    return "\n".join(texts)


def _parsed(arguments: Any) -> Any:
    """Tool call arguments as an object, if that is what their text says; no text at all is no arguments."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
