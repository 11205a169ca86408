"""Read and validate the vocabulary in a GGUF file's metadata."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, TypeVar

from tokenizers import AddedToken

from helexa.core.errors import ModelFileError

MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 20
MAX_ADDED_LENGTH = 1 << 20
"""Maximum total number of characters of added tokens. The library's search automaton takes about 80 bytes each."""

_T = TypeVar("_T")


class TokenType(IntEnum):
    """Type of a token; the value is the number in GGUF files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GgufVocabulary:
    """The vocabulary in a file's `tokenizer.ggml.*` keys. Each key is validated when it is read.

    Attributes:
        tokens: the tokens by id, as spelled in the file.
        types: the `TokenType` of each token.
        ids: the id of each token.

    Raises:
        ModelFileError: the tokens or their types are missing or malformed. The methods raise the same error for a
            malformed key.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        tokens = self.entries("tokens", MAX_TOKENS, str)
        # Empty tokens get llama.cpp's names, which are unique.
        self.tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
        self.types = self.entries("token_type", MAX_TOKENS, int)
        if len(self.types) != len(tokens):
            raise ModelFileError(f"tokenizer.ggml.token_type has {len(self.types)} entries for {len(tokens)} tokens")
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if not tokens:
            raise ModelFileError("tokenizer.ggml.tokens is empty")
        if len(self.ids) != len(tokens):
            raise ModelFileError("tokenizer.ggml.tokens lists a token twice")

    def added_tokens(self) -> list[AddedToken]:
        """Return the tokens that are matched literally in text. Control tokens and the unknown token are special."""
        kinds = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        added = [(token, kind) for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]
        if sum(len(token) for token, _ in added) > MAX_ADDED_LENGTH:
            raise ModelFileError(f"tokenizer.ggml.tokens has control tokens of more than {MAX_ADDED_LENGTH} characters")
        return [AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False) for token, kind in added]

    def merges(self) -> list[tuple[str, str]]:
        """Return the pairs of tokens to merge, in order of priority."""
        merges = []
        for merge in self.entries("merges", MAX_MERGES, str):
            left, _, right = merge.partition(" ")
            merges.append((left, right))
        return merges

    def token_id(self, kind: str) -> int | None:
        """Return the id of a special token such as `bos`, or None if the file has no such id."""
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
        """Return a boolean, or `default` if the key is missing."""
        flag = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(flag, bool):
            raise ModelFileError(f"tokenizer.ggml.{key} is not a boolean")
        return flag

    def entries(self, key: str, limit: int, *kinds: type[_T]) -> list[_T]:
        """Return a required list of at most `limit` entries of the given types."""
        values = gguf_value(self._metadata, key, list)
        if len(values) > limit:
            raise ModelFileError(f"tokenizer.ggml.{key} has {len(values)} entries, more than {limit}")
        if not all(isinstance(value, kinds) for value in values):
            raise ModelFileError(f"tokenizer.ggml.{key} has entries of the wrong type")
        return values


def gguf_value(metadata: Mapping[str, Any], key: str, kind: type[_T]) -> _T:
    """Return the value of `tokenizer.ggml.{key}`.

    Raises:
        ModelFileError: the key is missing or has another type.
    """
    key = f"tokenizer.ggml.{key}"
    if key not in metadata:
        raise ModelFileError(f"{key} is missing")
    value = metadata[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelFileError(f"{key} has the wrong type")
    return value
