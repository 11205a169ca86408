"""Convert messages from OpenAI's chat format to the format that a model's chat template reads.

`transformers` leaves most of this conversion to its callers. The rules are:

* Fields with null values are omitted. Reasoning is copied to `reasoning_content` and `thinking`, as in `transformers`.
  If the template reads neither, but content parts of type `thinking`, reasoning becomes the first part of the content.
* Tool results follow their calls in the order of the calls, and the ids of calls have the template's format
  (`call_matching`).
* The arguments of tool calls are JSON text in OpenAI's format. They are converted to objects, unless the template needs
  text. Arguments that are no JSON object stay text. If the template needs an object, the text becomes the value of the
  key `invalid_arguments`.
* In a message with tool calls, null content is omitted. If the template cannot render such a message without content,
  the content stays null. If the template cannot render null either, the content becomes empty text.
* In a message without tool calls, null content becomes empty text.
* A list of text parts becomes one text with one part per line, unless the template supports lists in messages of this
  role. Text becomes a list if the template only supports lists.
* Messages that the template would reject or omit are merged or split (`message_merging`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from helexa.neuron.text.templates.call_matching import calls_of, with_matched_results
from helexa.neuron.text.templates.message_merging import (
    REASONING,
    alternating,
    text_of,
    with_calls_apart,
    with_one_system_message,
    with_single_calls,
    with_system_in_user_message,
)
from helexa.neuron.text.templates.template_renderer import TemplateError
from helexa.neuron.text.templates.template_traits import Attempt, TemplateTraits

Message = Mapping[str, Any]
Turn = dict[str, Any]

_INVALID = "invalid_arguments"


class MessageShaper:
    """Converts messages to the format that one chat template reads.

    Args:
        attempt: function that renders a test conversation with the template.
        source: text of the template.
    """

    def __init__(self, attempt: Attempt, source: str) -> None:
        self._traits = TemplateTraits(attempt, source)

    def shaped(self, messages: Sequence[Message]) -> list[Turn]:
        """Return a copy of `messages` in the format of the template.

        Raises:
            TemplateError: a message has an image and the template supports only text.
        """
        turns = self._with_system([self._cleaned(message) for message in messages])
        if any(calls_of(turn) or turn.get("role") == "tool" for turn in turns):
            turns = with_matched_results(turns, self._traits.call_ids)
            if any(len(calls_of(turn)) > 1 for turn in turns) and not self._traits.takes_parallel_calls:
                turns = with_single_calls(turns)
            if any(calls_of(turn) and turn.get("content") for turn in turns):
                turns = self._with_text_beside_calls(turns)
        return [self._shaped(turn) for turn in turns]

    def repaired(self, shaped: Sequence[Turn]) -> Iterator[list[Turn]]:
        """Yield other forms of a conversation that the template has rejected, the best form first."""
        for empty in ("", [{"type": "text", "text": ""}]):  # Ministral's template rejects "", but no empty part
            turns = alternating(shaped, empty)
            if turns != shaped:
                yield turns

    def _cleaned(self, message: Message) -> Turn:
        turn = {key: value for key, value in message.items() if value is not None}
        if turn.get("role") == "developer" and not self._traits.takes_developer:
            turn["role"] = "system"
        reasoning = next((turn[key] for key in REASONING if key in turn), None)
        if reasoning is not None:
            turn = {"thinking": reasoning} | turn | {"reasoning_content": reasoning}
        return turn

    def _with_system(self, turns: list[Turn]) -> list[Turn]:
        later = any(turn.get("role") in ("system", "developer") for turn in turns[1:])
        if later and not self._traits.takes_systems_anywhere:
            turns = with_one_system_message(turns)
        if turns and turns[0].get("role") == "system" and not self._traits.takes_system:
            turns = with_system_in_user_message(turns)
        return turns

    def _with_text_beside_calls(self, turns: list[Turn]) -> list[Turn]:
        if not self._traits.takes_calls_beside_text:
            return list(with_calls_apart(turns))
        if self._traits.takes_reasoning_beside_text:
            return turns
        return [_with_text_as_reasoning(turn) for turn in turns]

    def _shaped(self, turn: Turn) -> Turn:
        calls, content = calls_of(turn), turn.get("content")
        if calls:
            turn = turn | {"tool_calls": [self._shaped_call(call) for call in calls]}
        if turn.get("role") == "assistant" and "reasoning_content" in turn and self._traits.reads_reasoning_parts:
            return _with_reasoning_part(turn)
        if content is None:
            return {**turn, **(self._traits.call_shape.content if calls else {"content": ""})}
        if isinstance(content, list) and not self._traits.takes_parts(turn.get("role")):
            return turn | {"content": _joined(content)}
        if isinstance(content, str) and content and not calls and self._reads_only_parts(turn.get("role")):
            return turn | {"content": [{"type": "text", "text": content}]}
        return turn

    def _reads_only_parts(self, role: Any) -> bool:
        return not self._traits.takes_text(role) and self._traits.takes_parts(role)

    def _shaped_call(self, call: Any) -> Any:
        function = call["function"]
        if "arguments" not in function:
            return call
        arguments = function["arguments"]
        value = _parsed(arguments)
        if self._traits.call_shape.as_text:
            is_object_text = (
                isinstance(arguments, str) and arguments.strip() and _parsed(arguments, depth=1) is not None
            )
            text = arguments if is_object_text or value is None else value
            arguments = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        elif value is not None:
            arguments = value
        elif not isinstance(arguments, str) or not self._traits.takes_any_arguments:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            arguments = text if self._traits.takes_any_arguments else {_INVALID: text}
        return {**call, "function": {**function, "arguments": arguments}}


def _with_text_as_reasoning(turn: Turn) -> Turn:
    """Return the message with the text at the end of the reasoning, if the message has reasoning, text and calls."""
    reasoning, text = turn.get("reasoning_content"), text_of(turn.get("content"))
    if not calls_of(turn) or not isinstance(reasoning, str) or not text:
        return turn
    reasoning = f"{reasoning}\n\n{text}"
    kept = {key: value for key, value in turn.items() if key != "content"}
    return kept | {"reasoning_content": reasoning, "thinking": reasoning}


def _with_reasoning_part(turn: Turn) -> Turn:
    """Return the message with its reasoning as the first part of the content."""
    content = turn.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return turn | {"content": [{"type": "thinking", "thinking": turn["reasoning_content"]}, *parts]}


def _joined(parts: list[Any]) -> str:
    text = text_of(parts)
    if text is None:
        other = next(part for part in parts if text_of([part]) is None)
        kind = other.get("type") if isinstance(other, Mapping) else None
        raise TemplateError(f"the chat template supports only text, not a content part of type '{str(kind)[:80]}'")
    return text


def _parsed(arguments: Any, depth: int = 2) -> dict[str, Any] | None:
    """Return the arguments of a tool call as an object. None if they are no JSON object.

    Absent arguments mean an empty object. Some clients encode the JSON text twice.

    Args:
        arguments: an object, or its JSON text.
        depth: maximum number of times that the text may be encoded.
    """
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str) or depth == 0:
        return None
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return None
    return _parsed(value, depth - 1) if isinstance(value, dict | str) and value != "" else None
