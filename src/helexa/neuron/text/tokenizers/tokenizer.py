"""A model's tokenizer: converts text to token ids and token ids to text."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from helexa.core.errors import ModelFileError
from helexa.neuron.text.json_file import read_object
from helexa.neuron.text.tokenizers.backend_errors import backend_errors
from helexa.neuron.text.tokenizers.gguf_tokenizer import GgufTokenizer
from helexa.neuron.text.tokenizers.space_prefix import remove_space_prefix
from helexa.neuron.text.tokenizers.text_offsets import TextOffsets
from helexa.neuron.text.tokenizers.token_bytes import token_spellers
from helexa.neuron.text.tokenizers.tokenizer_json import read_tokenizer_json

# Common texts of tokens that end a turn, used in addition to the end tokens in the model's files.
_END_TOKENS = {
    *("<eos>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>", "[EOT]"),
    *("<|return|>", "<|call|>", "<|end|>"),
}
# Tokens of infilling prompts (fill in the middle). They never belong to the text that fills a gap. A model that
# generates one of them has filled the gap and continues with another file or example.
_INFILLING_TOKENS = {
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>"),  # Qwen
    *("<|file_sep|>", "<|file_separator|>"),  # Qwen, CodeGemma
    *("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<reponame>", "<repo_name>"),  # StarCoder, Granite
    *("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>", "<file_sep>", "<filename>", "<gh_stars>"),
    *("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    *("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),  # Code Llama
    *("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),  # Codestral
    *("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),  # GLM
}
# In vocabularies with `<|return|>`, `<|end|>` ends a message but not the turn.
_END_OF_MESSAGE = "<|end|>"


class Tokenizer:
    """A model's vocabulary and tokenization rules. Tokenizers are thread-safe.

    Attributes:
        bos_id: id of the beginning-of-sequence token, or None.
        eos_id: id of the end-of-sequence token that the model's files specify, or None.
        eos_ids: ids of all tokens that end generation.
        add_bos: whether `encode(..., add_special=True)` puts `bos_id` first.
        add_eos: whether `encode(..., add_special=True)` puts `eos_id` last.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        end_ids: Iterable[int] = (),
        add_bos: bool = False,
        add_eos: bool = False,
    ) -> None:
        self._backend = backend
        self._variants: dict[tuple[bool, bool], tokenizers.Tokenizer] = {}
        self._added = backend.get_added_tokens_decoder()
        self._spell, self._spell_added = token_spellers(backend)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.add_bos = add_bos and bos_id is not None
        self.add_eos = add_eos and eos_id is not None
        names = _END_TOKENS | _INFILLING_TOKENS
        if self.token_id("<|return|>") is not None:
            names = names - {_END_OF_MESSAGE}
        known_ends = (token_id for token_id, token in self._added.items() if token.content in names)
        self.eos_ids: frozenset[int] = frozenset([*end_ids, *known_ends, *([] if eos_id is None else [eos_id])])

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Build the tokenizer that the metadata of a GGUF file describes.

        Raises:
            ModelFileError: the type of tokenizer is not supported, or the value of a key is invalid.
        """
        file = GgufTokenizer(metadata)
        return cls(
            file.backend,
            bos_id=file.bos_id,
            eos_id=file.eos_id,
            end_ids=file.end_ids,
            add_bos=file.add_bos,
            add_eos=file.add_eos,
        )

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer":
        """Build the tokenizer from `tokenizer.json` and the other configuration files in the model directory `path`.

        Raises:
            ModelFileError: a file is missing or malformed, or the type of tokenizer is not supported.
        """
        backend = read_tokenizer_json(path / "tokenizer.json")
        config = read_object(path / "special_tokens_map.json") | read_object(path / "tokenizer_config.json")
        bos_id, eos_id = (_named_id(backend, config.get(key)) for key in ("bos_token", "eos_token"))
        with backend_errors("tokenizer.json cannot be used"):
            special_ids = backend.encode("", add_special_tokens=True).ids
        add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
        if not isinstance(add_bos, bool):
            add_bos = special_ids[:1] == [bos_id]
        if not isinstance(add_eos, bool):
            add_eos = special_ids[add_bos:][-1:] == [eos_id]
        ends = _configured_ends(path, backend.get_vocab_size(with_added_tokens=True))
        return cls(backend, bos_id=bos_id, eos_id=eos_id, end_ids=ends, add_bos=add_bos, add_eos=add_eos)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary. A model's logits may have more entries as padding."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True, continues: bool = False
    ) -> list[int]:
        """Return the token ids of `text`.

        By default, a string such as `<|im_end|>` in the text becomes the control token with this name, as in Hugging
        Face's tokenizers. Rendered chat templates need this behavior. As a consequence, a user's message can contain
        control tokens.

        Args:
            text: any text. Lone surrogates are read as U+FFFD.
            add_special: whether to add the beginning-of-sequence and end-of-sequence tokens, if the model's files
                request them.
            parse_special: if False, the texts of control tokens are encoded as plain text.
            continues: whether the text continues other tokens. If True, no space is added before the text, unlike at
                the beginning of a text with many SentencePiece models.

        Raises:
            ModelFileError: the `tokenizers` library fails, which happens only with invalid tokenization rules.
        """
        ids = _encoded(self._variant(parse_special, continues), text).ids
        if not add_special:
            return ids
        first = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        last = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        return [*first, *ids, *last]

    def offsets(self, text: str) -> list[int]:
        """Return for each token of `encode(text, add_special=True)` the index in `text` of the token's first character.

        A token that continues a character has the index of this character.
        """
        offsets, end = [0] if self.add_bos else [], 0
        for start, stop in _encoded(self._backend, text).offsets:
            offsets.append(min(start, end))  # some tokenizers leave out the spaces at the beginning of a token
            end = max(end, stop)
        return [*offsets, *([len(text)] if self.add_eos else [])]

    def decoded_offsets(self, ids: Iterable[int]) -> list[int]:
        """Return for each token the index in `decode(ids)` of the character that the token begins or continues.

        A control token, which has no text, has the index of the next character.
        """
        offsets = TextOffsets()
        return [offsets.push(self.token_bytes(token_id)) for token_id in ids]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of the tokens `ids`.

        Invalid UTF-8 becomes U+FFFD. Unlike in Hugging Face's tokenizers, the leading space of SentencePiece is kept.

        Args:
            ids: token ids.
            skip_special: whether control tokens are omitted.
        """
        spelled = b"".join([self.token_bytes(token_id, skip_special=skip_special) for token_id in ids])
        return spelled.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """Return the bytes of text that a token represents.

        The result is empty for an id outside the vocabulary. It is also empty for a control token if `skip_special` is
        true.
        """
        added = self._added.get(token_id)
        if added is not None:
            if not added.special:
                return self._spell_added(added.content)
            return b"" if skip_special else added.content.encode()
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return b"" if token is None else self._spell(token)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token whose text in the vocabulary is exactly `text`, or None if no token matches."""
        return self._backend.token_to_id(text)

    def token_text(self, token_id: int | None) -> str | None:
        """Return the text of a token as in the vocabulary, or None if the id is outside the vocabulary."""
        if token_id is None or token_id < 0:
            return None
        added = self._added.get(token_id)  # the library would return the normalized text of the token
        return self._backend.id_to_token(token_id) if added is None else added.content

    def control_id(self, text: str) -> int | None:
        """Return the id of the control token whose text is exactly `text`, or None if no control token matches."""
        token_id = self._backend.token_to_id(text)
        added = None if token_id is None else self._added.get(token_id)
        return token_id if added is not None and added.special else None

    def added_text(self, token_id: int) -> str:
        """Return the text of an added token, such as a control token. Return "" for other tokens."""
        added = self._added.get(token_id)
        return "" if added is None else added.content

    def _variant(self, parse_special: bool, continues: bool) -> tokenizers.Tokenizer:
        """Return the tokenizer for these arguments of `encode`. All variants share the tokenization model."""
        if parse_special and not continues:
            return self._backend
        variant = self._variants.get((parse_special, continues))
        if variant is None:
            variant = tokenizers.Tokenizer(self._backend.model)
            if self._backend.normalizer is not None:
                variant.normalizer = self._backend.normalizer
            if self._backend.pre_tokenizer is not None:
                variant.pre_tokenizer = self._backend.pre_tokenizer
            if continues:
                remove_space_prefix(variant)
            variant.add_tokens([self._added[token_id] for token_id in sorted(self._added)])
            variant.encode_special_tokens = not parse_special
            self._variants[parse_special, continues] = variant
        return variant


def _encoded(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    with backend_errors("the tokenizer fails on this text"):
        try:
            return backend.encode(text, add_special_tokens=False)
        except TypeError:  # the library's error for lone surrogates
            replaced = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return backend.encode(replaced, add_special_tokens=False)


def _named_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """Return the id of a token that a configuration file specifies as a string or as an object with `content`.

    Return None if the value or the token is invalid.
    """
    if isinstance(token, dict):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _configured_ends(path: Path, vocab_size: int) -> list[int]:
    """Return the ids of end tokens in `generation_config.json` or `config.json`.

    The first file with valid ids is used. Invalid ids are ignored.
    """
    for name in ("generation_config.json", "config.json"):
        try:
            config = read_object(path / name)
        except ModelFileError:
            continue
        for section in (config, config.get("text_config")):
            ends = section.get("eos_token_id") if isinstance(section, dict) else None
            candidates = ends if isinstance(ends, list) else [ends]
            if valid := [end for end in candidates if type(end) is int and 0 <= end < vocab_size]:
                return valid
    return []
