"""A model's chat template, which renders messages as prompt text."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from helexa.neuron.text.templates.message_shaper import Message, MessageShaper
from helexa.neuron.text.templates.template_renderer import TemplateBoundsError, TemplateError, TemplateRenderer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Template for models that have no chat template."""

# Marker appended to the message to continue. The space after it shows whether the template trims messages.
_CONTINUE_MARK, _SPACE = "<continue here>", " "
_RENDERER = TemplateRenderer()


class ChatTemplate:
    """A Jinja template that renders conversations like `transformers`.

    A broken template raises an error when it is used, and not when the model is loaded, because text completion needs
    no template.

    Args:
        source: text of the template.
        tool_use: text of a separate template for conversations with tools, or None.
        special_tokens: texts of the special tokens that templates use as variables, for example `bos_token`.
    """

    def __init__(
        self, source: str, *, tool_use: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        self._tool_use = None if tool_use is None else ChatTemplate(tool_use, special_tokens=special_tokens)
        self.special_tokens = dict(special_tokens or {})
        self._shaper = MessageShaper(self._attempt, source)

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

        Args:
            messages: the conversation in the format of OpenAI's chat API. A `MessageShaper` converts the messages to
                the format that the template reads.
            tools: the available tools in the format of OpenAI's chat API. For an empty list, the template receives
                None.
            add_generation_prompt: whether the prompt ends with the header of a new assistant message.
            continue_final_message: whether the prompt ends within the last message, so that the model continues this
                message.
            variables: further variables of the template, for example `enable_thinking`.

        Raises:
            TemplateError: the template is broken, raises an error or exceeds its limits. The error is also raised if a
                message has an image and the template supports only text, or if the last message cannot be continued.
        """
        if tools and self._tool_use is not None:
            return self._tool_use.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        shaped = self._shaper.shaped(messages)

        def rendered(turns: list[dict[str, Any]]) -> str:
            if continue_final_message:
                return self._render_continued(turns, tools, variables)
            return self._run(turns, tools, add_generation_prompt, variables)

        try:
            return rendered(shaped)
        except TemplateBoundsError:
            raise
        except TemplateError:
            for turns in self._shaper.repaired(shaped):
                with suppress(TemplateError):
                    return rendered(turns)
            raise

    def mentions(self, variable: str) -> bool:
        """Return whether the template, or the separate template for tools, uses the variable `variable`.

        Return False if the template is broken.
        """
        return variable in self._variables or (self._tool_use is not None and self._tool_use.mentions(variable))

    @cached_property
    def _variables(self) -> frozenset[str]:
        try:
            return _RENDERER.undeclared(self.source)
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
        return _RENDERER.render(self.source, {"documents": None, **self.special_tokens, **variables, **inputs})

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
                raise TemplateError("the final message has no text to continue")
        text = self._run([*messages[:-1], messages[-1] | {"content": content}], tools, False, variables)
        head, mark, tail = text.rpartition(_CONTINUE_MARK)
        if not mark:
            raise TemplateError("the chat template does not render the final message, so it cannot be continued")
        return head if tail.startswith(_SPACE) else head.rstrip()
