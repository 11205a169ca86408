"""A model's chat template: messages to prompt text."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from helexa.core.errors import HelexaError
from helexa.neuron.text.json_file import read_object
from helexa.neuron.text.template_environment import TemplateEnvironment

Message = Mapping[str, Any]

MAX_SOURCE_LENGTH = 1 << 20
"""Characters of a template's source."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For models that bring no template."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_ENVIRONMENT = TemplateEnvironment()


class TemplateError(HelexaError):
    """A chat template is broken, or refuses these messages; the text carries its own words."""


class ChatTemplate:
    """A Jinja template that renders conversations.

    A broken template is not refused before it is used: a model without chat still completes text.

    Args:
        source: the template's text.
        bos_token: what the template may write as `bos_token`.
        eos_token: what it may write as `eos_token`.
    """

    def __init__(self, source: str, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        self.source = source
        self._constants = {"bos_token": bos_token or "", "eos_token": eos_token or ""}

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`.

        A message's `content` may be text, a list of parts, null or absent. It is passed on as it is where the
        template understands it; otherwise text parts are joined, one per line, and null becomes empty text. Tool call
        arguments that are JSON text are passed on as objects, unless the template only takes text.

        Args:
            messages: the conversation, as OpenAI's chat API has it.
            tools: the tools on offer, as OpenAI's chat API has them.
            add_generation_prompt: end with the beginning of an assistant's turn.
            variables: further variables of the template, such as `enable_thinking`.

        Raises:
            TemplateError: when the template is broken, raises an error or exceeds its bounds, and when an image is
                given to a template that only takes text.
        """
        shaped = [self._shaped(message) for message in messages]
        variables = {"tools": tools or None, "add_generation_prompt": add_generation_prompt} | variables
        return self._run(shaped, variables)

    def mentions(self, variable: str) -> bool:
        """Whether the template reads `variable` from its caller; False for a broken template."""
        return variable in self._variables

    @cached_property
    def _variables(self) -> frozenset[str]:
        try:
            self._compiled  # noqa: B018 - to see whether it is sound
        except TemplateError:
            return frozenset()
        return frozenset(jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(self.source)))

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if len(self.source) > MAX_SOURCE_LENGTH:
            raise TemplateError(f"the chat template is longer than {MAX_SOURCE_LENGTH} characters")
        try:
            return _ENVIRONMENT.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is broken in line {error.lineno}: {_line(error)}") from error
        except Exception as error:  # nesting beyond what Python compiles fails in several ways
            raise TemplateError(f"the chat template is broken: {_line(error)}") from error

    def _run(self, messages: list[dict[str, Any]], variables: Mapping[str, Any], seconds: float | None = None) -> str:
        template = self._compiled
        try:
            return _ENVIRONMENT.render(template, {"messages": messages, **self._constants, **variables}, seconds)
        except Exception as error:  # a template may raise anything that Python's operators raise
            raise TemplateError(f"the chat template failed: {_line(error)}") from error

    def _shaped(self, message: Message) -> dict[str, Any]:
        content = message.get("content")
        if content is None and not self._tool_call_shape[0]:
            content = ""
        elif isinstance(content, list) and not self._takes_parts:
            content = _joined(content)
        shaped = {**message, "content": content}
        if isinstance(message.get("tool_calls"), list):
            shaped["tool_calls"] = [self._shaped_call(call) for call in message["tool_calls"]]
        return shaped

    def _shaped_call(self, call: Any) -> Any:
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            return call
        arguments = call["function"].get("arguments")
        if self._tool_call_shape[1]:
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        else:
            arguments = _parsed(arguments)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _attempt(self, messages: list[dict[str, Any]]) -> str | None:
        """A trial: the text, or None where the template fails."""
        try:
            return self._run(messages, {"tools": None, "add_generation_prompt": True}, _TRIAL_SECONDS)
        except TemplateError:
            return None

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether lists of parts come out as their text, in every role."""
        marks = {"system": "first mark", "user": "second mark", "assistant": "third mark"}
        parts = [{"role": role, "content": [{"type": "text", "text": mark}]} for role, mark in marks.items()]
        text = self._attempt(parts) or ""
        return all(mark in text for mark in marks.values()) and "'type'" not in text and '"type"' not in text

    @cached_property
    def _tool_call_shape(self) -> tuple[bool, bool]:
        """Whether null content stays null beside tool calls, and whether their arguments must be text.

        Templates differ: some fail on null or write the word None, others show a call only beside null; most want
        objects, some can only append text. The first shape in which a call comes out is the one.
        """
        plain = self._attempt([_USER]) or ""
        for as_text in (False, True):
            for content in (None, ""):
                text = self._attempt([_USER, {"role": "assistant", "content": content, "tool_calls": [_call(as_text)]}])
                if text is not None and _TOOL in text and text.count("None") == plain.count("None"):
                    return content is None, as_text
        null = self._attempt([_USER, {"role": "assistant", "content": None}])
        return null is not None and null.count("None") == plain.count("None"), False


_TRIAL_SECONDS = 0.5
_USER = {"role": "user", "content": "question"}
_TOOL = "trial_tool"


def _call(as_text: bool) -> dict[str, Any]:
    function = {"name": _TOOL, "arguments": "{}" if as_text else {}}
    return {"id": "call00000", "type": "function", "function": function}


def _joined(parts: list[Any]) -> str:
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


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def template_source(path: Path) -> str | None:
    """The chat template in a model's directory, or None.

    `chat_template.jinja` comes before `chat_template.json`, and that before `tokenizer_config.json`. Where templates
    have names, it is the one named `default`, else the first.

    Raises:
        ModelFileError: when one of these files is not JSON.
    """
    try:
        source = (path / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    except OSError:
        source = ""
    if source.strip():
        return source
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = read_object(path / name).get("chat_template")
        if isinstance(found, list):
            named = [entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("template"), str)]
            found = next((entry for entry in named if entry.get("name") == "default"), named[0] if named else {})
            found = found.get("template")
        if isinstance(found, str) and found.strip():
            return found
    return None
