"""A model's chat template: renders messages as prompt text in a sandbox process.

`transformers` renders messages as they are, and templates read different formats. `MessageShaper` converts messages of
the OpenAI format to the format that a template reads:

* Fields with null values are omitted. Reasoning is copied to `reasoning_content` and `thinking`. If the template reads
  neither, but content parts of type `thinking`, reasoning becomes the first part of the content.
* Tool results follow their calls in order, and the ids of calls have the template's format (`message_order`).
* The arguments of tool calls, which are JSON text in OpenAI's format, become objects, unless the template needs text.
  Arguments that are no JSON object stay text, or become the value of the key `invalid_arguments`.
* Null content becomes empty text. In a message with tool calls, null content is omitted or stays null if the template
  supports this.
* A list of text parts becomes one text with one part per line, unless the template supports lists in messages of this
  role. Text becomes a list if the template supports only lists.
* Messages that the template would reject or omit are merged or split (`message_order`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from helexa.core.errors import HelexaError
from helexa.neuron.parsers.formats.tool_call_format import find_tool_call_format
from helexa.neuron.processes.inside_sandbox import MAX_BYTES
from helexa.neuron.processes.sandbox import ProcessPool, Sandbox, SandboxError
from helexa.neuron.text import TEMPLATE_PROCESS
from helexa.neuron.text.message_order import (
    REASONING,
    alternating,
    calls_of,
    text_of,
    with_calls_apart,
    with_matched_results,
    with_one_system_message,
    with_single_calls,
    with_system_in_user_message,
    with_text_in_results,
    with_tools_in_system,
)
from helexa.neuron.text.settings_and_sampling_defaults import MAX_SOURCE_LENGTH
from helexa.neuron.text.template_traits import Attempt, TemplateTraits, call_text, is_writable

MAX_SECONDS = 5.0  # maximum CPU time for rendering one prompt, in seconds

_SHARE = 2  # processes that one model uses at most, so that slow templates delay only their own model

PROCESSES = ProcessPool(TEMPLATE_PROCESS, kept=4)  # the template processes, which all models share

Message = Mapping[str, Any]
Turn = dict[str, Any]  # copy of a message that may be changed for the template

_INVALID = "invalid_arguments"

_EFFORT, _EFFORTS = "reasoning_effort", ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# Template for models that have no chat template.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Marker appended to the message to continue. The space after it shows whether the template trims messages.
_CONTINUE_MARK, _SPACE = "<continue here>", " "


class TemplateError(HelexaError):
    """A chat template is broken, or rejects the messages for the reason in the error."""


class TemplateBoundsError(TemplateError):
    """A chat template exceeded its time, memory or size limit."""


class TemplateRenderer:
    """Renders the templates of one model in sandbox processes. Thread-safe."""

    def __init__(self) -> None:
        self._sandbox = Sandbox(PROCESSES, _SHARE)

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Render the template `source` with `variables`, which are JSON values.

        Raises:
            TemplateError: the template is broken or raises an error.
            TemplateBoundsError: the template exceeds its time, memory or size limit.
        """
        return self._run(source, variables)

    def undeclared(self, source: str) -> frozenset[str]:
        """Return the names of the variables that `source` uses but does not define.

        Raises:
            TemplateError: the template is broken.
        """
        return frozenset(self._run(source, None).split())

    def _run(self, source: str, variables: Mapping[str, Any] | None) -> str:
        if len(source) > MAX_SOURCE_LENGTH:
            raise TemplateError(
                f"the chat template has {len(source)} characters, more than {MAX_SOURCE_LENGTH}; set a shorter "
                "chat_template"
            )
        request = json.dumps([source, variables, MAX_SECONDS], ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(request) > MAX_BYTES:
            size = f"{len(request) >> 20} MiB, more than {MAX_BYTES >> 20} MiB"
            raise TemplateBoundsError(f"the chat template and its variables take {size}; shorten the messages")
        try:
            response = self._sandbox.request(request)
        except SandboxError as error:
            raise TemplateBoundsError(
                f"the chat template failed: {error}; shorten the messages, or set another chat_template"
            ) from error
        text = response[1:].decode("utf-8", "surrogatepass")
        if response[:1] != b"=":
            raise TemplateError(text)  # for example "the chat template is broken in line 3: ..."
        return text


class MessageShaper:
    """Converts messages to the format that one chat template reads.

    For the arguments, see `TemplateTraits`.
    """

    def __init__(self, attempt: Attempt, source: str) -> None:
        self._traits = TemplateTraits(attempt, source)
        known = find_tool_call_format(lambda _: False, source)
        self._call_format = known if is_writable(known) else None

    def shaped(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> list[Turn]:
        """Return a copy of `messages` in the format of the template.

        If the template omits tool calls, the calls become text. If the template reads the tools from a field of the
        system message, as the templates of Phi-4-mini and OLMo 3 do, the tools are added to this field.

        Raises:
            TemplateError: a message has an image and the template supports only text, or the template exceeds a limit
                for a test message (subclass TemplateBoundsError).
        """
        turns = self._with_system([self._cleaned(message) for message in messages])
        if any(calls_of(turn) or turn.get("role") == "tool" for turn in turns):
            turns = with_matched_results(turns, self._traits.call_ids)
            if any(len(calls_of(turn)) > 1 for turn in turns) and not self._traits.takes_parallel_calls:
                turns = with_single_calls(turns)
            if any(calls_of(turn) and turn.get("content") for turn in turns):
                turns = self._with_text_beside_calls(turns)
        shaped = [self._shaped(turn) for turn in turns]
        field = self._traits.system_tools_field if tools else None
        return with_tools_in_system(shaped, tools or (), field) if field else shaped

    def repaired(self, shaped: Sequence[Turn]) -> Iterator[list[Turn]]:
        """Yield other forms of a conversation that the template rejected, best first."""
        # Mistral's templates reject a user message directly after a tool result. Its text is moved into the result if
        # possible, because an empty answer between the two would lead the model to give empty answers. The text is not
        # moved if the template omits the system message of conversations that end with a tool result.
        folded = [with_text_in_results(shaped)] if self._traits.keeps_system_before_results else []
        for messages in (*folded, shaped):
            for empty in ("", [{"type": "text", "text": ""}]):  # Ministral's template rejects "", but no empty part
                turns = alternating(messages, empty)
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
        if turn.get("role") == "tool" and self._traits.result_role != "tool":
            turn = turn | {"role": self._traits.result_role}
        if calls:
            turn = turn | {"tool_calls": [self._shaped_call(call) for call in calls]}
            if (
                self._call_format is not None
                and is_writable(self._call_format)
                and not self._traits.call_shape.rendered
            ):
                text = text_of(content) or ""
                calls, content = [], text + call_text(self._call_format, turn.pop("tool_calls"))
                turn = turn | {"content": content}
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
    """Return a message with calls with its text moved to the end of its reasoning."""
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
        raise TemplateError(
            f"the chat template supports only text, not a content part of type '{str(kind)[:80]}'; leave this part out"
        )
    return text


def _parsed(arguments: Any, depth: int = 2) -> dict[str, Any] | None:
    """Return the arguments of a tool call as an object, or None for other values.

    Absent arguments mean an empty object. Some clients encode the JSON text twice, which needs a `depth` of 2.
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


# Members that Command R's template needs, by the type of a parameter.
_MEMBERS: Mapping[str, dict[str, Any]] = {"object": {"additionalProperties": {}}}


def _completed(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool whose parameters have the members that Command R's template needs."""
    match tool:
        case {"function": {"parameters": {"properties": dict(properties)} as parameters} as function}:
            complete = {
                name: {"description": "", **_MEMBERS.get(str(schema.get("type")), {}), **schema}
                for name, schema in properties.items()
                if isinstance(schema, Mapping)
            }
            return {**tool, "function": {**function, "parameters": {**parameters, "properties": properties | complete}}}
        case _:
            return tool


class ChatTemplate:
    """A Jinja template that renders conversations like `transformers`.

    A broken template raises an error only when it is used, because text completion needs no template.

    Args:
        tool_use: text of a separate template for conversations with tools, or None.
        special_tokens: texts of the special tokens that templates use as variables, for example `bos_token`.
        renderer: renderer of the model's templates; None for a new renderer.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_use: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        self.source = source
        self._renderer = renderer or TemplateRenderer()
        self._tool_use = (
            None if tool_use is None else ChatTemplate(tool_use, special_tokens=special_tokens, renderer=self._renderer)
        )
        self.special_tokens = dict(special_tokens or {})
        self._shaper = MessageShaper(self._attempt, source)
        self._efforts: dict[str, str] = {}  # the effort that the template accepts, by the effort in the request

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of the prompt for `messages`.

        If the template rejects the messages or tools, other forms of them are tried. The variable `reasoning_effort` is
        replaced by the nearest effort that the template accepts.

        Args:
            messages: the conversation in the format of OpenAI's chat API.
            tools: the available tools in the format of OpenAI's chat API.
            add_generation_prompt: whether the prompt ends with the header of a new assistant message.
            continue_final_message: whether the prompt ends within the last message; replaces `add_generation_prompt`.
            variables: further variables of the template, for example `enable_thinking`.

        Raises:
            TemplateError: the template is broken, raises an error or exceeds its limits, a message has an image and the
                template supports only text, or the last message cannot be continued.
        """
        if tools and self._tool_use is not None:
            return self._tool_use.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        if isinstance(effort := variables.get(_EFFORT), str):
            variables = variables | {_EFFORT: self._accepted_effort(effort)}
        shaped = self._shaper.shaped(messages, tools)

        def rendered(turns: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None = tools) -> str:
            if continue_final_message:
                return self._render_continued(turns, tools, variables)
            return self._run(turns, tools, add_generation_prompt, variables)

        try:
            return rendered(shaped)
        except TemplateBoundsError:
            raise
        except TemplateError:
            # Try other forms of the messages, then other forms of the tools. If all fail, raise the first error.
            for turns in self._shaper.repaired(shaped):
                with suppress(TemplateError):
                    return rendered(turns)
            if tools:
                with suppress(TemplateError):
                    return rendered(shaped, [_completed(tool) for tool in tools])
            raise

    def _accepted_effort(self, effort: str) -> str:
        """Return the reasoning effort nearest to `effort` that the template accepts.

        Of two equally near efforts, the higher one is returned. For example, Qwen3.8's template raises an error for
        OpenAI's usual value `high`.
        """
        if effort not in _EFFORTS or not self.mentions(_EFFORT):
            return effort
        if effort not in self._efforts:
            wanted = _EFFORTS.index(effort)
            nearest = sorted(_EFFORTS, key=lambda other: (abs(_EFFORTS.index(other) - wanted), -_EFFORTS.index(other)))
            self._efforts[effort] = next((other for other in nearest if self._takes_effort(other)), effort)
        return self._efforts[effort]

    def _takes_effort(self, effort: str) -> bool:
        with suppress(TemplateError):
            self._run([{"role": "user", "content": "trial"}], None, True, {_EFFORT: effort})
            return True
        return False

    def mentions(self, variable: str) -> bool:
        """Return whether a template of the model uses `variable`; False if it is broken."""
        return variable in self._variables or (self._tool_use is not None and self._tool_use.mentions(variable))

    @cached_property
    def _variables(self) -> frozenset[str]:
        try:
            return self._renderer.undeclared(self.source)
        except TemplateError:
            return frozenset()

    def _run(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        inputs = {"tools": tools or None, "messages": messages, "add_generation_prompt": add_generation_prompt}
        return self._renderer.render(self.source, {"documents": None, **self.special_tokens, **variables, **inputs})

    def _attempt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
        try:
            return self._run(messages, tools, True, {})
        except TemplateBoundsError:
            raise
        except TemplateError:
            return None

    def _render_continued(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str:
        content = messages[-1].get("content") if messages else None
        match content:
            case str():
                content += _CONTINUE_MARK + _SPACE
            case [*earlier_parts, {"text": str(text)} as last]:
                content = [*earlier_parts, last | {"text": text + _CONTINUE_MARK + _SPACE}]
            case _:
                raise TemplateError("the final message has no text to continue; omit `continue_final_message`")
        text = self._run([*messages[:-1], messages[-1] | {"content": content}], tools, False, variables)
        head, mark, tail = text.rpartition(_CONTINUE_MARK)
        if not mark:
            raise TemplateError(
                "the chat template does not render the final message, so the message cannot be continued; "
                "omit `continue_final_message`"
            )
        return head if tail.startswith(_SPACE) else head.rstrip()
