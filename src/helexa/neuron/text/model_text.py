"""Text processing of one model: it converts conversations to prompt tokens, and generated tokens to text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.text.output_format import OutputFormat
from helexa.neuron.text.pooling import Pooling, pooling_in_directory, pooling_in_gguf
from helexa.neuron.text.sampling_defaults import SamplingDefaults, defaults_in_directory, defaults_in_gguf
from helexa.neuron.text.templates.chat_template import CHATML, ChatTemplate
from helexa.neuron.text.templates.message_shaper import Message
from helexa.neuron.text.templates.template_renderer import TemplateError
from helexa.neuron.text.templates.template_sources import TemplateSources
from helexa.neuron.text.tokenizers.special_tokens import special_tokens_in_directory, special_tokens_in_gguf
from helexa.neuron.text.tokenizers.tokenizer import Tokenizer
from helexa.neuron.weights.gguf.files import GgufFile, gguf_models

InsertImages = Callable[[str, int], str]
"""Function that replaces the placeholders of images in a rendered prompt.

The arguments are the prompt and the number of images in its messages.
"""


@dataclass(frozen=True)
class TextCapabilities:
    """Whether a model supports tool calls and reasoning, according to its vocabulary and chat template."""

    tool_call: bool
    reasoning: bool


class ModelText:
    """The tokenizer, chat template and other text settings that a model's files define.

    Attributes:
        tokenizer: converts text to token ids and back.
        template: chat template, which renders messages as text.
        sampling_defaults: values that the model's publisher recommends for `temperature`, `top_p`, `top_k`, `min_p` and
            `repetition_penalty`.
        pooling: method that combines hidden states into one embedding vector.
        output_format: reasoning format and tool-call format of the model's output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_source: str | None,
        sampling_defaults: SamplingDefaults,
        *,
        tool_use: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        pooling: Pooling = "mean",
    ) -> None:
        self.tokenizer = tokenizer
        self.sampling_defaults = sampling_defaults
        self.pooling: Pooling = pooling
        source = CHATML if template_source is None else template_source
        self.template = ChatTemplate(source, tool_use=tool_use, special_tokens=special_tokens)
        self.output_format = OutputFormat(tokenizer, (template_source or "") + (tool_use or ""))
        # A model's template writes the beginning-of-sequence token. The fallback template does not.
        first = tokenizer.bos_id if template_source is None and tokenizer.add_bos else None
        self._prefix = [] if first is None else [first]

    @property
    def capabilities(self) -> TextCapabilities:
        """Whether the model supports tool calls, and whether it supports reasoning."""
        return TextCapabilities(
            tool_call=self.output_format.tool_call_format is not None or self.template.mentions("tools"),
            reasoning=self.output_format.separates_reasoning or self.template.mentions("enable_thinking"),
        )

    @classmethod
    def open(cls, path: Path) -> "ModelText":
        """Read the tokenizer, chat template and text settings from the files of the model at `path`.

        Args:
            path: a .gguf file, a directory with a tokenizer.json, or a directory with one GGUF model.

        Raises:
            ModelFileError: `path` contains no model, or its files are malformed or not supported.
        """
        if path.is_dir() and (path / "tokenizer.json").is_file():
            return cls._from_directory(path)
        return cls._from_gguf(_gguf_in(path) if path.is_dir() else path)

    @classmethod
    def _from_directory(cls, path: Path) -> "ModelText":
        templates = TemplateSources.in_directory(path)
        return cls(
            Tokenizer.from_directory(path),
            templates.default,
            defaults_in_directory(path),
            tool_use=templates.tool_use,
            special_tokens=special_tokens_in_directory(path),
            pooling=pooling_in_directory(path),
        )

    @classmethod
    def _from_gguf(cls, path: Path) -> "ModelText":
        file = GgufFile.open(path)
        templates = TemplateSources.in_gguf(file.metadata)
        try:
            tokenizer = Tokenizer.from_gguf(file.metadata)
        except ModelFileError as error:
            raise ModelFileError(f"{path.name}: {error}; the model is of architecture '{file.architecture}'") from error
        return cls(
            tokenizer,
            templates.default,
            defaults_in_gguf(file.metadata),
            tool_use=templates.tool_use,
            special_tokens=special_tokens_in_gguf(file.metadata, tokenizer),
            pooling=pooling_in_gguf(file.metadata),
        )

    def prompt_ids(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        insert_images: InsertImages | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Render `messages` with the chat template and return the token ids of the prompt.

        By default, the prompt ends with the header of a new assistant message.

        Args:
            tools: the available tools in the format of OpenAI's chat API.
            insert_images: function that replaces the placeholders of images; None for messages without images.
            template_kwargs: further arguments of `ChatTemplate.render`, and variables of the template.

        Raises:
            TemplateError: the template cannot render the messages.
        """
        text = self.template.render(messages, tools=tools, **template_kwargs)
        if insert_images is not None:
            text = insert_images(text, sum(map(_image_count, messages)))
        return [*self._prefix, *self.tokenizer.encode(text)]

    def prompt_and_turn_start(
        self,
        messages: Sequence[Message],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        insert_images: InsertImages | None = None,
        **template_kwargs: Any,
    ) -> tuple[list[int], int]:
        """Return the prompt, and the number of tokens at its beginning that do not depend on the last user message.

        To find these tokens, the method renders a second conversation, which ends with another text as the last user
        message. It then counts the tokens that both prompts have in common at the beginning. The last common token
        does not count, because it may contain the first characters of the user message.

        The second conversation needs a last user message. Templates omit reasoning before the last user message, so
        without this message the prompts would already differ at earlier reasoning.

        Returns:
            The token ids of the prompt, and the number of common tokens. The number is 0 if there is no user message or
            the template rejects the second conversation.

        Raises:
            TemplateError: the template cannot render `messages`.
        """
        prompt = self.prompt_ids(messages, tools, insert_images, **template_kwargs)
        last = next((index for index in reversed(range(len(messages))) if messages[index].get("role") == "user"), None)
        if last is None:
            return prompt, 0
        changed = {**messages[last], "content": _different_message(messages[last].get("content"))}
        ending = {"add_generation_prompt": True, "continue_final_message": False}
        try:
            other_prompt = self.prompt_ids(
                [*messages[:last], changed], tools, insert_images, **template_kwargs | ending
            )
        except TemplateError:
            return prompt, 0
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, other_prompt, strict=False)))
        return prompt, max(common - 1, 0)


def _gguf_in(path: Path) -> Path:
    files = gguf_models(path)
    if len(files) != 1:
        contents = f"no tokenizer.json and {len(files) or 'no'} .gguf files"
        raise ModelFileError(f"{path} contains {contents}; name a model file")
    return files[0]


def _image_count(message: Message) -> int:
    content = message.get("content")
    return sum(part.get("type") == "image" for part in content) if isinstance(content, list) else 0


def _different_message(content: Any) -> str:
    """Return a text for a user message. Its first character differs from the first character of `content`."""
    first = content[0] if isinstance(content, list) and content else content
    text = first.get("text") if isinstance(first, Mapping) else first
    return "1" if isinstance(text, str) and text.lstrip().startswith("0") else "0"
