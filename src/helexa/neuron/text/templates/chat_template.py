"""A model's chat template: messages to prompt text."""

from collections.abc import Mapping, Sequence
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
"""For models that bring no template."""

# What stands at the end of a message that is to be continued; the space shows whether the template trims messages.
_CUT, _SPACE = "<the answer goes on here>", " "
_RENDERER = TemplateRenderer()


class ChatTemplate:
    """A Jinja template that renders conversations as `transformers` does.

    A broken template is not refused before it is used: a model without chat still completes text.

    Args:
        source: the template's text.
        tool_use: the text of the template that is used instead when there are tools.
        special_tokens: what templates may write by name, such as `bos_token`.
    """

    def __init__(
        self, source: str, *, tool_use: str | None = None, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        self._tool_use = None if tool_use is None else ChatTemplate(tool_use, special_tokens=special_tokens)
        self.special_tokens = dict(special_tokens or {})
        self._shaper = MessageShaper(self._attempt)

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
        """The prompt for `messages`.

        Args:
            messages: the conversation, as OpenAI's chat API has it; see `MessageShaper`.
            tools: the tools on offer, as OpenAI's chat API has them; no tools at all are None to the template.
            add_generation_prompt: end with the beginning of an assistant's turn.
            continue_final_message: end in the midst of the last message, so that the answer continues it.
            variables: further variables of the template, such as `enable_thinking`.

        Raises:
            TemplateError: when the template is broken, raises an error or exceeds its bounds, when an image is given
                to a template that only takes text, and when the last message cannot be continued.
        """
        if tools and self._tool_use is not None:
            return self._tool_use.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        shaped = [self._shaper.shaped(message) for message in messages]
        if continue_final_message:
            return self._continued(shaped, tools, variables)
        return self._run(shaped, tools, add_generation_prompt, variables)

    def mentions(self, variable: str) -> bool:
        """Whether the template, or that for tools, reads `variable` from its caller; False for a broken one."""
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
        given = {"tools": tools or None, "messages": messages, "add_generation_prompt": add_generation_prompt}
        return _RENDERER.render(self.source, {"documents": None, **self.special_tokens, **variables, **given})

    def _attempt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
        try:
            return self._run(messages, tools, True, {})
        except TemplateBoundsError:
            raise
        except TemplateError:
            return None

    def _continued(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
    ) -> str:
        content = messages[-1].get("content") if messages else None
        match content:
            case str():
                content += _CUT + _SPACE
            case [*before, {"text": str(text)} as last]:
                content = [*before, last | {"text": text + _CUT + _SPACE}]
            case _:
                raise TemplateError("the final message has no text to continue")
        text = self._run([*messages[:-1], messages[-1] | {"content": content}], tools, False, variables)
        head, cut, tail = text.rpartition(_CUT)
        if not cut:
            raise TemplateError("the chat template does not write the final message, so that it cannot be continued")
        return head if tail.startswith(_SPACE) else head.rstrip()
