"""Text to token ids and back."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from helexa.core.errors import ModelFileError
from helexa.neuron.text.json_file import read_object
from helexa.neuron.text.tokenizers.backend_errors import backend_errors
from helexa.neuron.text.tokenizers.gguf_tokenizer import GgufTokenizer
from helexa.neuron.text.tokenizers.token_bytes import token_spellers
from helexa.neuron.text.tokenizers.tokenizer_json import read_tokenizer_json

# Names under which vocabularies keep the tokens that end a turn, whatever else their files declare.
_END_TOKENS = {
    *("<eos>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<EOT>", "[EOT]"),
    *("<|return|>", "<|call|>", "<|end|>"),
}
# Where a vocabulary has `<|return|>`, this one ends a message, and the turn goes on.
_END_OF_MESSAGE = "<|end|>"


class Tokenizer:
    """A model's vocabulary and the rules that cut text into it.

    Safe to use from several threads.

    Attributes:
        bos_id: the token that begins a sequence, or None.
        eos_id: the token that ends one, as the model's files name it, or None.
        eos_ids: all tokens that end generation.
        add_bos: whether `encode(..., add_special=True)` puts `bos_id` first.
        add_eos: whether it puts `eos_id` last.
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
        self._added = backend.get_added_tokens_decoder()
        self._spell, self._spell_added = token_spellers(backend)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.add_bos = add_bos and bos_id is not None
        self.add_eos = add_eos and eos_id is not None
        names = _END_TOKENS - ({_END_OF_MESSAGE} if self.token_id("<|return|>") is not None else set())
        named = (token_id for token_id, token in self._added.items() if token.content in names)
        self.eos_ids: frozenset[int] = frozenset([*end_ids, *named, *([] if eos_id is None else [eos_id])])

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer in the metadata of a GGUF file.

        Raises:
            ModelFileError: when its kind is not supported or its keys are malformed.
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
        """The tokenizer in `tokenizer.json`, with the special tokens that the files beside it name.

        Raises:
            ModelFileError: when a file is missing or malformed, or the kind of tokenizer is not supported.
        """
        backend = read_tokenizer_json(path / "tokenizer.json")
        config = read_object(path / "special_tokens_map.json") | read_object(path / "tokenizer_config.json")
        bos_id, eos_id = (_named_id(backend, config.get(key)) for key in ("bos_token", "eos_token"))
        with backend_errors("tokenizer.json cannot be used"):
            framed = backend.encode("", add_special_tokens=True).ids
        add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token")
        if not isinstance(add_bos, bool):
            add_bos = framed[:1] == [bos_id]
        if not isinstance(add_eos, bool):
            add_eos = framed[add_bos:][-1:] == [eos_id]
        ends = _configured_ends(path, backend.get_vocab_size(with_added_tokens=True))
        return cls(backend, bos_id=bos_id, eos_id=eos_id, end_ids=ends, add_bos=add_bos, add_eos=add_eos)

    @property
    def vocab_size(self) -> int:
        """Number of tokens; a model's output may be padded to more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """The token ids of `text`.

        Control tokens spelled out in the text become control tokens, as in Hugging Face's tokenizers: a rendered chat
        template needs that, and it means that a message which spells one out is not distinguished from the template.

        Args:
            text: any text; lone surrogates are read as U+FFFD.
            add_special: put the beginning-of-sequence token first and the end-of-sequence token last, if the model's
                files want that.
            parse_special: False leaves control tokens in the text as the plain text that they are spelled with.

        Raises:
            ModelFileError: when the library fails, which the rules of a sound file do not make it do.
        """
        backend = self._backend if parse_special else self._literal
        with backend_errors("the tokenizer fails on this text"):
            try:
                ids = backend.encode(text, add_special_tokens=False).ids
            except TypeError:  # what the library makes of a surrogate
                whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                ids = backend.encode(whole, add_special_tokens=False).ids
        if not add_special:
            return ids
        first = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        last = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        return [*first, *ids, *last]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 read as U+FFFD, a leading space of SentencePiece's stays."""
        spelled = b"".join([self.token_bytes(token_id, skip_special=skip_special) for token_id in ids])
        return spelled.decode("utf-8", "replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes a token stands for; none for an id outside the vocabulary, or for a control token if skipped."""
        added = self._added.get(token_id)
        if added is not None:
            if not added.special:
                return self._spell_added(added.content)
            return b"" if skip_special else added.content.encode()
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        return b"" if token is None else self._spell(token)

    def token_id(self, text: str) -> int | None:
        """The id of the token written exactly `text` in the vocabulary, or None."""
        return self._backend.token_to_id(text)

    def token_text(self, token_id: int | None) -> str | None:
        """The token as the vocabulary writes it, or None."""
        if token_id is None or token_id < 0:
            return None
        added = self._added.get(token_id)  # the library would answer with what it looks for in normalized text
        return self._backend.id_to_token(token_id) if added is None else added.content

    def added_text(self, token_id: int) -> str:
        """The text of a token that was added to the vocabulary, as control tokens and other markers are; else ""."""
        added = self._added.get(token_id)
        return "" if added is None else added.content

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A twin over the same model that does not look for control tokens."""
        twin = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            twin.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            twin.pre_tokenizer = self._backend.pre_tokenizer
        twin.add_tokens([self._added[token_id] for token_id in sorted(self._added)])
        twin.encode_special_tokens = True
        return twin


def _named_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """The id of a token that a configuration names by its text, plain or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _configured_ends(path: Path, vocab_size: int) -> list[int]:
    """The end tokens in the first configuration that names some. It is advice: what is not understood is left out."""
    for name in ("generation_config.json", "config.json"):
        try:
            config = read_object(path / name)
        except ModelFileError:
            continue
        for part in (config, config.get("text_config")):
            ends = part.get("eos_token_id") if isinstance(part, dict) else None
            listed = ends if isinstance(ends, list) else [ends]
            if known := [end for end in listed if type(end) is int and 0 <= end < vocab_size]:
                return known
    return []
