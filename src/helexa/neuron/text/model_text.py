"""The text side of one model: what the server needs to turn conversations into tokens and tokens into text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.text.notation import Notation
from helexa.neuron.text.pooling import Pooling, pooling_in_directory, pooling_in_gguf
from helexa.neuron.text.sampling_defaults import SamplingDefaults, defaults_in_directory, defaults_in_gguf
from helexa.neuron.text.templates.chat_template import CHATML, ChatTemplate
from helexa.neuron.text.templates.message_shaper import Message
from helexa.neuron.text.templates.template_renderer import TemplateError
from helexa.neuron.text.templates.template_sources import TemplateSources
from helexa.neuron.text.tokenizers.special_tokens import special_tokens_in_directory, special_tokens_in_gguf
from helexa.neuron.text.tokenizers.tokenizer import Tokenizer
from helexa.neuron.weights.gguf.files import GgufFile, gguf_models


@dataclass(frozen=True)
class TextCapabilities:
    """What a model's vocabulary and template show that it was made for."""

    tool_call: bool
    reasoning: bool


class ModelText:
    """One model's tokenizer, chat template and defaults.

    Attributes:
        tokenizer: text to ids and back.
        template: messages to text.
        sampling_defaults: what the model's maker recommends, of `temperature`, `top_p`, `top_k`, `min_p` and
            `repetition_penalty`.
        pooling: how its hidden states become one vector.
        notation: how it writes reasoning and calls.
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
        self.notation = Notation(tokenizer, (template_source or "") + (tool_use or ""))
        # A template writes the first token itself; the fallback does not know of one.
        first = tokenizer.bos_id if template_source is None and tokenizer.add_bos else None
        self._begin = [] if first is None else [first]

    @property
    def capabilities(self) -> TextCapabilities:
        """What the model was made for."""
        return TextCapabilities(
            tool_call=self.notation.family is not None or self.template.mentions("tools"),
            reasoning=self.notation.reasons or self.template.mentions("enable_thinking"),
        )

    @classmethod
    def open(cls, path: Path) -> "ModelText":
        """Read the text side of the model at `path`.

        Args:
            path: a .gguf file, a directory with a tokenizer.json, or a directory with one GGUF model.

        Raises:
            ModelFileError: when there is no model there, or its files are malformed or of an unsupported kind.
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
        self, messages: Sequence[Message], /, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """The prompt for `messages`, as token ids, ending where the assistant's turn begins.

        Args:
            template_kwargs: what else `ChatTemplate.render` takes, and variables of the template.

        Raises:
            TemplateError: when the template cannot render them.
        """
        text = self.template.render(messages, tools=tools, **template_kwargs)
        return [*self._begin, *self.tokenizer.encode(text)]

    def prompt_and_turn_start(
        self, messages: Sequence[Message], /, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> tuple[list[int], int]:
        """The prompt, and how many tokens at its beginning stay when the last user message is said anew.

        That is what it has in common with the prompt of a conversation which says something else there and ends with
        it, less one token, which may run into what the message begins with. A conversation that only ends before that
        message would have less in common: templates leave out the reasoning of turns before the last question.

        Returns:
            What `prompt_ids` returns, and a number; 0 where there is no user message, or the template refuses the other
            conversation.

        Raises:
            TemplateError: when the template cannot render the conversation itself.
        """
        prompt = self.prompt_ids(messages, tools, **template_kwargs)
        last = next((index for index in reversed(range(len(messages))) if messages[index].get("role") == "user"), None)
        if last is None:
            return prompt, 0
        other = {**messages[last], "content": _other(messages[last].get("content"))}
        ending = {"add_generation_prompt": True, "continue_final_message": False}
        try:
            anew = self.prompt_ids([*messages[:last], other], tools, **template_kwargs | ending)
        except TemplateError:
            return prompt, 0
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, anew, strict=False)))
        return prompt, max(common - 1, 0)


def _gguf_in(path: Path) -> Path:
    files = gguf_models(path)
    if len(files) != 1:
        raise ModelFileError(f"{path} holds no tokenizer.json and {len(files) or 'no'} .gguf files; name a model file")
    return files[0]


def _other(content: Any) -> str:
    """A message that does not begin as `content` does."""
    first = content[0] if isinstance(content, list) and content else content
    text = first.get("text") if isinstance(first, Mapping) else first
    return "1" if isinstance(text, str) and text.lstrip().startswith("0") else "0"
