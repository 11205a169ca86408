"""Detect what a chat template renders, and write the tool calls that it omits.

The detection renders short test conversations.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from helexa.neuron.parsers.call_ids import MISTRAL_IDS, OPENAI_IDS, CallIdFormat
from helexa.neuron.parsers.formats.hermes import CLOSE, OPEN, Hermes
from helexa.neuron.parsers.formats.llama_json_and_mistral import JsonCalls
from helexa.neuron.parsers.formats.pythonic import Pythonic, PythonicLines
from helexa.neuron.parsers.formats.tool_call_format import ToolCallFormat

# Function that renders messages and tools with the template. It returns the text, or None if rendering fails.
Attempt = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str | None]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ABSENT: Mapping[str, Any] = {}
_NULL = {"content": None}
_EMPTY = {"content": ""}

_MARK, _SECOND_MARK = "trial mark", "trial rest"
_USER = {"role": "user", "content": "trial message"}
_ANSWER = {"role": "assistant", "content": "trial answer"}
_PARTS = [{"type": "text", "text": text} for text in (_MARK, _SECOND_MARK)]
_NAME = "trial_tool"
_SHORT_ID, _OTHER_SHORT_ID = "call00000", "call00001"
_LONG_ID = "call_0123456789abcdef01234567"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "trial",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "key"}}},
    },
}


class CallShape(NamedTuple):
    """How a template expects an assistant message with tool calls and no text."""

    content: Mapping[str, Any]  # the content field of this message: absent, null or empty text
    as_text: bool  # whether the arguments must be JSON text instead of an object
    rendered: bool = True  # whether the template renders tool calls at all


class TemplateTraits:
    """Which kinds of messages a chat template renders, and in which form.

    Each property is detected when it is first read, and then cached. The detection may raise the errors of `attempt`.
    """

    def __init__(self, attempt: Attempt, source: str) -> None:
        self._attempt = attempt  # function that renders a test conversation with the template
        self._source = source  # text of the template
        self._parts_support: dict[str, bool] = {}
        self._text_support: dict[str, bool] = {}

    @cached_property
    def call_shape(self) -> CallShape:
        """How the template expects an assistant message with tool calls and no text."""
        plain = self._attempt([_USER], [_TOOL]) or ""
        for as_text in (False, True):
            for content in (_ABSENT, _NULL, _EMPTY):
                shape = CallShape(content, as_text)
                text = self._attempt([_USER, _call_turn(shape), _result()], [_TOOL]) or ""
                # A template that does not support null content may write the word `None` for it.
                if _MARK in text and text.count("None") == plain.count("None"):
                    return shape
        return CallShape(_EMPTY, False, rendered=False)

    @cached_property
    def system_tools_field(self) -> str | None:
        """Field of the system message with the tools; None if they are read elsewhere."""
        # Phi-4-mini's template reads `tools`, OLMo 3's `functions`. Both are JSON text.
        if _NAME in (self._attempt([_turn("system", _MARK), _USER], [_TOOL]) or ""):
            return None
        functions = json.dumps([_TOOL["function"]])
        for name in ("tools", "functions"):
            turn = _turn("system", _MARK) | {name: functions}
            if name in self._source and _NAME in (self._attempt([turn, _USER], None) or ""):
                return name
        return None

    @cached_property
    def result_role(self) -> str:
        """The role of messages with results of tools."""
        if "environment" not in self._source or _MARK in (self._attempt(self._around("tool", _MARK), None) or ""):
            return "tool"
        turns = [*self._around("tool", _MARK)[:-1], _result() | {"role": "environment", "content": _MARK}]
        return "environment" if _MARK in (self._attempt(turns, None) or "") else "tool"

    @cached_property
    def takes_any_arguments(self) -> bool:
        """Whether the template also renders arguments that are no JSON object, as text."""
        call = _call_turn(self.call_shape, arguments=_MARK)
        return self.call_shape.as_text or _MARK in (self._attempt([_USER, call, _result()], [_TOOL]) or "")

    @cached_property
    def takes_parallel_calls(self) -> bool:
        """Whether the template renders several calls in one message, or no calls at all."""
        turn = _call_turn(self.call_shape)
        other = _call_turn(self.call_shape, _OTHER_SHORT_ID, {"key": _SECOND_MARK})
        both = turn | {"tool_calls": [*turn["tool_calls"], *other["tool_calls"]]}
        text = self._attempt([_USER, both, _result(), _result(_OTHER_SHORT_ID)], [_TOOL]) or ""
        return not self.call_shape.rendered or (_MARK in text and _SECOND_MARK in text)

    @cached_property
    def takes_calls_beside_text(self) -> bool:
        """Whether the template renders calls in a message with text, or no calls at all."""
        call = _call_turn(self.call_shape) | {"content": _ANSWER["content"]}
        return not self.call_shape.rendered or _MARK in (self._attempt([_USER, call, _result()], [_TOOL]) or "")

    @cached_property
    def takes_reasoning_beside_text(self) -> bool:
        """Whether the template accepts reasoning, text and calls together, or no calls."""
        call = _call_turn(self.call_shape) | {"content": "trial", "reasoning_content": "trial", "thinking": "trial"}
        return not self.call_shape.rendered or self._attempt([_USER, call, _result()], [_TOOL]) is not None

    @cached_property
    def reads_reasoning_parts(self) -> bool:
        """Whether the template reads reasoning only as a content part of type `thinking`."""
        # Mistral's templates read reasoning in this way.
        fields = {"reasoning_content": _MARK, "thinking": _MARK, "reasoning": _MARK}
        parts = [{"type": "thinking", "thinking": _MARK}, {"type": "text", "text": _ANSWER["content"]}]
        if _MARK in (self._attempt([_USER, _ANSWER | fields], None) or ""):
            return False
        text = self._attempt([_USER, _ANSWER | {"content": parts}], None) or ""
        return text.count(_MARK) == 1 and not _is_printed(text)

    @cached_property
    def call_ids(self) -> CallIdFormat | None:
        """The format of the ids of tool calls.

        None if the template writes `functions.NAME:INDEX` instead of the ids of calls, but writes the ids of results.
        """
        for id, id_format in ((_LONG_ID, OPENAI_IDS), (_SHORT_ID, MISTRAL_IDS)):
            text = self._attempt([_USER, _call_turn(self.call_shape, id), _result(id)], [_TOOL])
            if text is not None:
                return None if text.count(id) == 1 and f"functions.{_NAME}:0" in text else id_format
        return OPENAI_IDS

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template renders a first system message.

        Also True if the template cannot be tested, because it rejects a lone user message or does not render it.
        """
        text = self._attempt([_turn("system", _MARK), _USER], None)
        if text is None:
            return self._attempt([_USER], None) is None
        return _MARK in text or _USER["content"] not in text

    @cached_property
    def keeps_system_before_results(self) -> bool:
        """Whether the template renders the system message if a tool result comes last."""
        # Mistral Nemo's template omits the system message if a tool result comes last.
        turns = [_turn("system", _SECOND_MARK), _USER, _call_turn(self.call_shape), _result()]
        return _SECOND_MARK in (self._attempt(turns, [_TOOL]) or "")

    @cached_property
    def takes_developer(self) -> bool:
        """Whether the template knows `developer`, OpenAI's newer name of `system`."""
        if "developer" not in self._source:  # a template may write any role name without knowing it
            return False
        return _MARK in (self._attempt([_turn("developer", _MARK), _USER], None) or "")

    @cached_property
    def takes_systems_anywhere(self) -> bool:
        """Whether the template renders system messages between other messages."""
        first, second = _turn("system", _MARK), _turn("system", _SECOND_MARK)
        if self.takes_system and _MARK not in (self._attempt([first, _USER], None) or ""):
            return True  # the template renders no messages, so the test proves nothing
        texts = [
            self._attempt(turns, None) or ""
            for turns in ([first, second, _USER], [first, _USER, _ANSWER, second, _USER])
        ]
        return all(text.count(mark) == 1 for text in texts for mark in (_MARK, _SECOND_MARK))

    def takes_parts(self, role: Any) -> bool:
        """Return whether the template renders lists of text parts in messages of `role`."""
        name = role if role in _ROLES else "user"
        if name not in self._parts_support:
            text = self._attempt(self._around(name, _PARTS), None) or ""
            rendered = all(text.count(part["text"]) == 1 for part in _PARTS)
            self._parts_support[name] = rendered and not _is_printed(text)
        return self._parts_support[name]

    def takes_text(self, role: Any) -> bool:
        """Return whether the template renders a string as content in messages of `role`."""
        name = role if role in _ROLES else "user"
        if name not in self._text_support:
            # Some templates of vision models read only lists of parts, and render a string as empty text.
            self._text_support[name] = _MARK in (self._attempt(self._around(name, _MARK), None) or "")
        return self._text_support[name]

    def _around(self, role: str, content: Any) -> list[dict[str, Any]]:
        """Return a test conversation with a message of `role` and `content`."""
        if role == "tool":
            return [_USER, _call_turn(self.call_shape, arguments={}), _result() | {"content": content}]
        turn = _turn(role, content)
        return [turn] if role == "user" else [_USER, turn] if role == "assistant" else [turn, _USER]


def _is_printed(text: str) -> bool:
    """Return whether `text` contains content parts as Python or JSON values."""
    return "'type'" in text or '"type"' in text


def _turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _result(id: str = _SHORT_ID) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "name": _NAME, "content": "result"}


def _call_turn(shape: CallShape, id: str = _SHORT_ID, arguments: Any = None) -> dict[str, Any]:
    """Return an assistant message with a call of the test tool."""
    arguments = {"key": _MARK} if arguments is None else arguments
    text = json.dumps(arguments) if shape.as_text and not isinstance(arguments, str) else arguments
    call = {"id": id, "type": "function", "function": {"name": _NAME, "arguments": text}}
    return {"role": "assistant", **shape.content, "tool_calls": [call]}


def is_writable(tool_call_format: ToolCallFormat | None) -> bool:
    """Return whether `call_text` can write tool calls in a format."""
    return isinstance(tool_call_format, JsonCalls | Pythonic | Hermes)


def call_text(tool_call_format: ToolCallFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return the text with which a model writes `calls` that its chat template omits.

    Args:
        tool_call_format: a format that `is_writable` accepts.
        calls: tool calls in the format of OpenAI's chat API, with arguments as objects.
    """
    functions = [call["function"] for call in calls]
    if isinstance(tool_call_format, Pythonic):
        written = [f"{function.get('name')}({_keywords(function.get('arguments'))})" for function in functions]
        if isinstance(tool_call_format, PythonicLines):
            return tool_call_format.start + "\n".join(written) + tool_call_format.end
        return f"{tool_call_format.start}[{', '.join(written)}]{tool_call_format.end}"
    objects = [
        _json({"name": function.get("name"), "arguments": function.get("arguments", {})}) for function in functions
    ]
    if isinstance(tool_call_format, JsonCalls):
        return f"{tool_call_format.opener}[{', '.join(objects)}]{tool_call_format.closer}"
    return "\n".join(f"{OPEN}\n{written}\n{CLOSE}" for written in objects)


def _keywords(arguments: Any) -> str:
    if not isinstance(arguments, Mapping):
        return ""
    return ", ".join(f"{name}={_json(value)}" for name, value in arguments.items())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
