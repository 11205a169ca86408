"""The text side of one model: what the server needs to turn conversations into tokens and tokens into text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.text.chat_template import CHATML, ChatTemplate, Message, template_source
from helexa.neuron.text.json_file import read_object
from helexa.neuron.text.tokenizer import Tokenizer
from helexa.neuron.weights.gguf import GgufFile

_REASONING_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
_TOOL_MARKS = (("<tool_call>", "</tool_call>"),)

# Our name, and the name in a GGUF file's metadata; generation_config.json uses ours.
_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


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
        capabilities: what the model was made for.
    """

    def __init__(
        self, tokenizer: Tokenizer, template_source: str | None, sampling_defaults: dict[str, float | int]
    ) -> None:
        self.tokenizer = tokenizer
        self.sampling_defaults = sampling_defaults
        self.template = ChatTemplate(
            CHATML if template_source is None else template_source,
            bos_token=tokenizer.token_text(tokenizer.bos_id),
            eos_token=tokenizer.token_text(tokenizer.eos_id),
        )
        self.capabilities = TextCapabilities(
            tool_call=self._has_marks(_TOOL_MARKS) or self.template.mentions("tools"),
            reasoning=self._has_marks(_REASONING_MARKS) or self.template.mentions("enable_thinking"),
        )
        # A template writes the first token itself; the fallback does not know of one.
        self._add_special = template_source is None

    @classmethod
    def open(cls, path: Path) -> "ModelText":
        """Read the text side of the model at `path`.

        Args:
            path: a .gguf file, a directory with a tokenizer.json, or a directory with one .gguf file.

        Raises:
            ModelFileError: when there is no model there, or its files are malformed or of an unsupported kind.
        """
        if path.is_dir() and (path / "tokenizer.json").is_file():
            return cls._from_directory(path)
        return cls._from_gguf(_gguf_in(path) if path.is_dir() else path)

    @classmethod
    def _from_directory(cls, path: Path) -> "ModelText":
        try:
            generation = read_object(path / "generation_config.json")
        except ModelFileError:
            generation = {}
        defaults = {name: generation.get(name) for name in _SAMPLING_KEYS}
        return cls(Tokenizer.from_directory(path), template_source(path), _numbers(defaults))

    @classmethod
    def _from_gguf(cls, path: Path) -> "ModelText":
        file = GgufFile.open(path)
        metadata = file.metadata
        source = metadata.get("tokenizer.chat_template")
        defaults = {name: metadata.get(key) for name, key in _SAMPLING_KEYS.items()}
        try:
            tokenizer = Tokenizer.from_gguf(metadata)
        except ModelFileError as error:
            raise ModelFileError(f"{path.name}: {error}; the model is of architecture '{file.architecture}'") from error
        return cls(tokenizer, source if isinstance(source, str) and source.strip() else None, _numbers(defaults))

    def prompt_ids(
        self, messages: Sequence[Message], /, tools: Sequence[Mapping[str, Any]] | None = None, **template_kwargs: Any
    ) -> list[int]:
        """The prompt for `messages`, as token ids, ending where the assistant's turn begins.

        Raises:
            TemplateError: when the template cannot render them.
        """
        text = self.template.render(messages, tools=tools, **template_kwargs)
        return self.tokenizer.encode(text, add_special=self._add_special)

    def _has_marks(self, pairs: Sequence[tuple[str, str]]) -> bool:
        return any(all(self.tokenizer.token_id(mark) is not None for mark in pair) for pair in pairs)


def _gguf_in(path: Path) -> Path:
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise ModelFileError(f"{path} holds no tokenizer.json and {len(files) or 'no'} .gguf files; name a model file")
    return files[0]


def _numbers(values: Mapping[str, Any]) -> dict[str, float | int]:
    return {name: value for name, value in values.items() if type(value) in (int, float) and math.isfinite(value)}
