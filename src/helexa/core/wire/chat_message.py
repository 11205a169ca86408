"""Messages of OpenAI's chat completions API."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from helexa.core.wire import BILLING_LINE
from helexa.core.wire.request import WireObject

IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})

# Name of the field with the text, by the type of a text part. `input_text` and `output_text` are types of the Responses
# API.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THINKING_PARTS = ("thinking", "redacted_thinking")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_REASONING_BLOCKS = ("thinking_blocks", "reasoning_details")  # signed reasoning of LiteLLM and of OpenRouter
_ANSWER_ONLY = ("audio", "annotations", "parsed", "function_call", "refusal", *_REASONING_BLOCKS)
_Content = str | list[dict[str, Any]] | None
_Calls = list[dict[str, Any]] | None


def _content(value: Any) -> Any:
    """Check the content of a message: a string, None, or text and image parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content", "the content of a message must be a string, a list of parts or null")
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError(
                "content", "part {index} of the content is not an object with a 'type'", {"index": index}
            )
        if kind in IMAGE_PARTS or kind in _THINKING_PARTS:
            continue
        field = _TEXT_PARTS.get(kind)
        if field is None:
            raise PydanticCustomError(
                "content",
                "part {index} of the content is of unknown type '{kind}'; send text or image_url",
                {"index": index, "kind": kind[:100]},
            )
        if not isinstance(part.get(field), str):
            raise PydanticCustomError(
                "content",
                "part {index} of the content has no '{field}' string; add one",
                {"index": index, "field": field},
            )
    return value


def _calls(value: Any) -> _Calls:
    """Check tool calls, and keep only the fields that chat templates read.

    Clients add fields of their own, for example `index` after a streamed answer, and some templates print all fields.
    """
    if value is None:
        return None
    if not isinstance(value, list):
        raise PydanticCustomError("tool_calls", "the tool calls must be a list or null")
    return [_call(call, index) for index, call in enumerate(value)]


def _call(call: Any, index: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise PydanticCustomError(
            "tool_calls", "tool call {index} must have a 'function' with a 'name' that is not empty", {"index": index}
        )
    call_id = call.get("id")
    named = {} if call_id in (None, "") else {"id": call_id if isinstance(call_id, str) else str(call_id)[:256]}
    arguments = function.get("arguments")
    return {
        **named,
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }


class ChatMessage(WireObject):
    """One message of a chat.

    Undeclared fields, such as `name`, are passed to the chat template.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[_Content, PlainValidator(_content, json_schema_input_type=_Content)] = None
    tool_calls: Annotated[_Calls, PlainValidator(_calls, json_schema_input_type=_Calls)] = None

    @model_validator(mode="after")
    def _check_thinking(self) -> "ChatMessage":
        if self.role != "assistant" and isinstance(self.content, list):
            for part in self.content:
                if part["type"] in _THINKING_PARTS:
                    raise PydanticCustomError(
                        "content",
                        "parts of type '{kind}' are only allowed in assistant messages; remove the part",
                        {"kind": part["type"]},
                    )
        return self

    @property
    def has_image(self) -> bool:
        """Whether a part of the content is an image."""
        return isinstance(self.content, list) and any(part["type"] in IMAGE_PARTS for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """Return the message as a chat template's input, equal for equivalent messages.

        * Undeclared fields that are null or empty are left out, and so is an empty list of tool calls.
        * Text parts have the type `text`. Empty text parts are left out. A single text part becomes a string.
        * Images become `{"type": "image"}`.
        * The billing line of Claude Code is removed from the system prompt. Programs that convert requests of Claude
          Code to this API leave it there.
        * In an assistant message, a refusal is the content, a `function_call` is a tool call, and signed reasoning is
          `reasoning_content`. Content without text is null if there are tool calls.
        """
        fields = {name: value for name, value in (self.model_extra or {}).items() if value not in (None, "", [], {})}
        content = self.content
        if self.role in ("system", "developer"):
            content = without_billing_line(content)
        message: dict[str, Any] = {"role": self.role, "content": _content_for_template(content)}
        if self.role != "assistant":
            return message | fields
        calls = self.tool_calls or _legacy_call(fields.get("function_call"))
        if not message["content"] and isinstance(refusal := fields.get("refusal"), str):
            message["content"] = refusal
        if calls:
            message["tool_calls"] = calls
            if isinstance(message["content"], str) and not message["content"].strip():
                message["content"] = None
        reasoning = "" if any(name in fields for name in _REASONING) else self._signed_reasoning(fields)
        fields = {name: value for name, value in fields.items() if name not in _ANSWER_ONLY}
        return message | fields | ({"reasoning_content": reasoning} if reasoning else {})

    def _signed_reasoning(self, fields: Mapping[str, Any]) -> str:
        """Return the reasoning in `thinking` parts, or in fields of LiteLLM or OpenRouter."""
        blocks: Sequence[Any] = self.content if isinstance(self.content, list) else ()
        for source in (blocks, *(fields.get(name) for name in _REASONING_BLOCKS)):
            texts = [_thought(block) for block in source] if isinstance(source, list) else []
            if text := "\n".join(filter(None, texts)):
                return text
        return ""


def _thought(block: Any) -> str:
    """Return the text of a block of reasoning.

    The result is empty for encrypted blocks and for blocks of other types.
    """
    match block:
        case {"type": "thinking", "thinking": str(text)} | {"type": "reasoning.text", "text": str(text)}:
            return text
        case {"type": "thinking", "thinking": list(chunks)}:  # Mistral's format
            return "".join([chunk["text"] for chunk in chunks if isinstance(chunk, dict) and _is_text(chunk)])
        case _:
            return ""


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def _content_for_template(content: _Content) -> _Content:
    if not isinstance(content, list):
        return content
    parts = [_part_for_template(part) for part in content if part["type"] not in _THINKING_PARTS]
    parts = [part for part in parts if part.get("text") != ""]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and _is_text(parts[0]) else parts


def _part_for_template(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] in IMAGE_PARTS:
        return {"type": "image"}
    return {"type": "text", "text": part[_TEXT_PARTS[part["type"]]]}


def _legacy_call(function_call: Any) -> _Calls:
    """Return the tool call in the deprecated field `function_call`."""
    match function_call:
        case {"name": str(name)} if name:
            return [_call({"function": {"name": name, "arguments": function_call.get("arguments")}}, 0)]
        case _:
            return None


def is_billing_line(text: str) -> bool:
    """Return whether `text` begins with the billing line of Claude Code."""
    return text.startswith(BILLING_LINE)


def without_billing_line(content: _Content) -> _Content:
    """Return the content of a system message without Claude Code's billing line."""
    if isinstance(content, str):
        return content.partition("\n")[2].lstrip("\n") if is_billing_line(content) else content
    # The line is in the first part. A router that forwards the request may have joined the line and the prompt.
    if not content or content[0].get("type") != "text" or not isinstance(text := content[0].get("text"), str):
        return content
    return [content[0] | {"text": without_billing_line(text)}, *content[1:]]
