"""Read and validate the vocabulary in a GGUF file's metadata."""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from tokenizers import AddedToken

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.token_types import TokenType, corrected_types

_log = logging.getLogger("helexa.neuron.text")

MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 20
MAX_ADDED_LENGTH = 1 << 20
"""Maximum total number of characters in added tokens. The library's automaton takes about 80 bytes per character."""

_SHOWN, _SHOWN_LENGTH = 5, 40

_T = TypeVar("_T")


class GgufVocabulary:
    """The vocabulary in the `tokenizer.ggml.*` keys of a GGUF file's metadata. A key is validated when it is read.

    Attributes:
        tokens: the texts of the tokens by id, as in the file.
        types: the `TokenType` of each token, by id.
        ids: the id of each token, by text.

    Raises:
        ModelFileError: the tokens or their types are missing or invalid. The methods raise the same error if the key
            that they read is invalid.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        tokens = self.entries("tokens", MAX_TOKENS, str)
        # Empty tokens get llama.cpp's names, which are unique.
        self.tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
        types = self.entries("token_type", MAX_TOKENS, int) if "tokenizer.ggml.token_type" in metadata else None
        if types is not None and len(types) != len(tokens):
            raise ModelFileError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        self.types = corrected_types(metadata, tokens, types)
        self._warn_of_corrections(tokens, types)
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if not tokens:
            raise ModelFileError("tokenizer.ggml.tokens is empty")
        if len(self.ids) != len(tokens):
            raise ModelFileError("tokenizer.ggml.tokens lists a token twice")

    def _warn_of_corrections(self, tokens: list[str], types: list[int] | None) -> None:
        before = [TokenType.NORMAL] * len(tokens) if types is None else types
        changed = [
            repr(token[:_SHOWN_LENGTH])
            for token, old, new in zip(tokens, before, self.types, strict=True)
            if old != new and new != TokenType.BYTE
        ]
        if types is None:
            _log.warning("the file has no token types: control tokens are recognized by their text")
        if changed:
            names = ", ".join(changed[:_SHOWN]) + (" .." if len(changed) > _SHOWN else "")
            _log.warning(
                "the file states wrong types of %d special tokens, which are corrected: %s", len(changed), names
            )

    def added_tokens(self) -> list[AddedToken]:
        """Return the added tokens, which are found in a text before it is tokenized.

        Control tokens and the unknown token are special tokens. User-defined tokens are not special.
        """
        kinds = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        added = [(token, kind) for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]
        if sum(len(token) for token, _ in added) > MAX_ADDED_LENGTH:
            raise ModelFileError(f"tokenizer.ggml.tokens has control tokens of more than {MAX_ADDED_LENGTH} characters")
        return [AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False) for token, kind in added]

    def merges(self) -> list[tuple[str, str]]:
        """Return the BPE merges: pairs of tokens that become one token, highest priority first."""
        merges = []
        for merge in self.entries("merges", MAX_MERGES, str):
            left, _, right = merge.partition(" ")
            merges.append((left, right))
        return merges

    def token_id(self, kind: str) -> int | None:
        """Return the id of a special token, or None if the file does not specify it.

        Args:
            kind: name of the special token in the keys of GGUF metadata, such as `bos`.
        """
        key = f"{kind}_token_id"
        if f"tokenizer.ggml.{key}" not in self._metadata:
            return None
        token_id = gguf_value(self._metadata, key, int)
        if not 0 <= token_id < len(self.tokens):
            raise ModelFileError(
                f"tokenizer.ggml.{key} is {token_id}, outside a vocabulary of {len(self.tokens)} tokens"
            )
        return token_id

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean at `tokenizer.ggml.{key}`, or `default` if the key is missing."""
        flag = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(flag, bool):
            raise ModelFileError(f"tokenizer.ggml.{key} is not a boolean")
        return flag

    def entries(self, key: str, limit: int, *kinds: type[_T]) -> list[_T]:
        """Return the list at `tokenizer.ggml.{key}`, which must have at most `limit` entries of the types `kinds`."""
        values = gguf_value(self._metadata, key, list)
        if len(values) > limit:
            raise ModelFileError(f"tokenizer.ggml.{key} has {len(values)} entries, more than {limit}")
        if not all(isinstance(value, kinds) for value in values):
            raise ModelFileError(f"tokenizer.ggml.{key} has entries of the wrong type")
        return values


def gguf_value(metadata: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    """Return the value at `tokenizer.ggml.{key}` in a GGUF file's metadata.

    Raises:
        ModelFileError: the key is missing, or the type of its value is not `kind`.
    """
    key = f"tokenizer.ggml.{key}"
    if key not in metadata:
        raise ModelFileError(f"{key} is missing")
    value = metadata[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelFileError(f"{key} has the wrong type")
    return value
