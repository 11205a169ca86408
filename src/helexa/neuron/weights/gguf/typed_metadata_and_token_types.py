"""Typed access to the metadata of a GGUF model, and the types of its tokens."""

import math
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.header_and_metadata_reader import StringArray, is_list_of, is_name

_MAX_INTEGER = 2**31 - 1


class Metadata:
    """Metadata of a GGUF model, read by keys without the architecture's prefix.

    For example, the key `block_count` means `llama.block_count` in a model of architecture `llama`.

    Raises:
        ModelFileError: a key without a default is missing, or a value is invalid. The message names the key. All
            methods raise this error.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = file.architecture  # the value of `general.architecture`
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._file.metadata

    def is_set(self, key: str) -> bool:
        """Return whether the value at `key` exists and is not 0."""
        # llama.cpp ignores many keys whose value is 0.
        return self._file.metadata.get(f"{self.architecture}.{key}", 0) != 0

    def has_tensor(self, name: str) -> bool:
        """Return whether the file has the tensor `name`."""
        return name in self._file.tensors

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return the integer at `key`, at least `least`; `default` for a missing key."""
        value = self._value(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            # A list with one integer per layer is accepted if all are equal.
            value = value[0]
        if type(value) is not int or not least <= value <= _MAX_INTEGER:
            raise self.error(key, f"is not one whole number from {least} to {_MAX_INTEGER}, but {_shown(value)}")
        return value

    def integers(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """Return the integer at `key` for each of the first `layers` layers, at least 0.

        One integer in the file is the value of all layers, and so is `default` for a missing key.
        """
        value = self._value(key, default)
        # The value is a list, or one integer for all layers.
        values = value[:layers] if isinstance(value, list) else [value] * layers
        if len(values) < layers or not all(type(one) is int and 0 <= one <= _MAX_INTEGER for one in values):
            raise self.error(key, f"is not a whole number from 0 to {_MAX_INTEGER} for each of {layers} layers")
        return values

    def number(self, key: str, default: float | None = None) -> float:
        """Return the positive finite number at `key`, or `default` if the key is missing."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, f"is not a positive number, but {_shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean at `key`, or `default` if the key is missing."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, f"is neither true nor false, but {_shown(value)}")
        return value

    def text(self, key: str, default: str) -> str:
        """Return the printable string at `key`, or `default` if the key is missing."""
        value = self._value(key, default)
        # Error messages contain the string, so it must be printable and short.
        if not is_name(value):
            raise self.error(key, "is not a short printable text")
        return value

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """Return the booleans of the first `layers` layers; None without a list at `key`."""
        value = self._value(key, False)
        if not isinstance(value, list | StringArray):
            return None
        if len(value) < layers or not all(type(flag) in (bool, int) for flag in value):
            raise self.error(key, f"must be a list of {layers} booleans, one per layer")
        return [bool(flag) for flag in value[:layers]]

    def layer_types(self, marked: str, key: str, layers: int, every: int) -> list[str]:
        """Return the type of each layer: the argument `marked`, or "full_attention".

        The list of flags at `key` says which layers have the type `marked`. Without a list of flags, each `every`-th
        layer has full attention.
        """
        flags = self.flags(key, layers) or [(index + 1) % every != 0 for index in range(layers)]
        return [marked if flag else "full_attention" for flag in flags]

    def windowed_layers(self, layers: int, every: int) -> list[str]:
        """Return the type of each layer of a model with sliding windows in some layers.

        Each n-th layer has full attention. The metadata define n or list the layers; `every` is the default of n.
        """
        key = "attention.sliding_window_pattern"
        # The key holds either a list of flags, one per layer, or the interval.
        if self.flags(key, layers) is None:
            every = self.integer(key, every)
        return self.layer_types("sliding_attention", key, layers, every)

    def require_neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Check that keys which no method has read do not change the computation.

        Args:
            neutral: for each key, the values that do not change the computation.
        """
        for key, values in neutral.items():
            value = self._file.metadata.get(f"{self.architecture}.{key}", values[0])
            if key not in self._read and value not in values:
                shown = value if isinstance(value, bool | int | float) else "not a number"
                raise self.unsupported(key, f"is {shown}, which is not supported for this architecture")

    def token(self, kind: str) -> int | None:
        """Return the id of the `bos` or `eos` token; None if the file has none."""
        value = self._file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value <= _MAX_INTEGER):
            raise ModelFileError(
                f"{self._file.path.name}: key tokenizer.ggml.{kind}_token_id is {_shown(value)}, expected a token id"
            )
        return value

    def error(self, key: str, problem: str) -> ModelFileError:
        """Return an error whose message names the file and the key, followed by `problem`."""
        return ModelFileError(f"{self._file.path.name}: key {self.architecture}.{key} {problem}")

    def unsupported(self, key: str, problem: str) -> ModelFileError:
        """Return the `error` for a value that this version does not support."""
        return UnsupportedModelError(f"{self._file.path.name}: key {self.architecture}.{key} {problem}")

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.error(key, "is missing")
        return value


def _shown(value: Any) -> str:
    return "a list" if isinstance(value, list | StringArray) else repr(value)[:40]


class TokenType(IntEnum):
    """In GGUF metadata: the type of a token. The values are the numbers in files."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_BYTE = re.compile("<0x[0-9A-F]{2}>")
_CONTROL = re.compile(
    r"<\|[^\s<>]+>|<[^\s<>]+\|>|<｜[^\s<>]+｜>|</?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_\w+>|\[/?[A-Z_]+\]"
)
_VISIBLE = re.compile(r"</?(?:think|tool_call|tool_response|tools)>")
_ENDS = re.compile(
    r"<\|(?:im_end|eot_id|eom_id|endoftext|end_of_text|return|call)\|>|<end_of_turn>|<｜end▁of▁sentence｜>"
)
_IDS = ("bos", "eos", "eot", "eom")


def corrected_types(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int] | None, ids: Sequence[int] | None = None
) -> list[int]:
    """Return the types of tokens, with the wrong types of some converters corrected.

    Args:
        tokens: texts of the tokens.
        types: the types in the file; None if the file has no types.
        ids: ids of `tokens` and `types`; None for all tokens of the vocabulary.
    """
    normal, user_defined, control = int(TokenType.NORMAL), int(TokenType.USER_DEFINED), int(TokenType.CONTROL)
    corrected = [normal] * len(tokens) if types is None else list(types)
    named = {metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in _IDS}
    template = "\n".join(
        value for key, value in metadata.items() if key.startswith("tokenizer.chat_template") and isinstance(value, str)
    )
    # Only tokens that begin with `<` or `[` need a check. Nearly all tokens of a vocabulary begin otherwise.
    for index in [index for index, token in enumerate(tokens) if token.startswith(("<", "["))]:
        token, kind, token_id = tokens[index], corrected[index], index if ids is None else ids[index]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE):
            continue
        if kind == user_defined:
            if _ENDS.fullmatch(token):
                corrected[index] = control
        elif types is None and _BYTE.fullmatch(token):
            corrected[index] = int(TokenType.BYTE)
        # Markers of reasoning and tool calls, which must stay in the text of an answer.
        elif _VISIBLE.fullmatch(token) and token in template:
            corrected[index] = user_defined
        # The token looks like a control token, and the chat template or the file's settings use it. As a normal token,
        # its text would be split in prompts, and it would not end answers.
        elif _ENDS.fullmatch(token) or (_CONTROL.fullmatch(token) and (token_id in named or token in template)):
            corrected[index] = control
    return corrected


def suppressed_tokens(metadata: Mapping[str, Any], rows: int) -> list[int]:
    """Return the ids below `rows` that, by GGUF metadata, must never be generated."""
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    # An invalid vocabulary is not reported here, because `GgufVocabulary` reports it.
    if not is_list_of(tokens, str) or not tokens:
        return []
    unused: list[int] = []
    # `corrected_types` makes no token unused, so only the tokens that are unused in the file are decoded.
    unused_type = int(TokenType.UNUSED)  # comparing with an int is faster than with an enum member
    if is_list_of(types, int) and len(types) == len(tokens) and unused_type in types:
        ids = [token_id for token_id, kind in enumerate(types) if kind == unused_type]
        texts = tokens.some(ids) if isinstance(tokens, StringArray) else [tokens[token_id] for token_id in ids]
        corrected = corrected_types(metadata, texts, [types[token_id] for token_id in ids], ids)
        unused = [token_id for token_id, kind in zip(ids, corrected, strict=True) if kind == unused_type]
    stated = metadata.get("tokenizer.ggml.suppress_tokens")
    # Tokens that are never generated: unused tokens, ids after the vocabulary's end, and ids that the file lists.
    never = {*unused, *range(len(tokens), rows), *(stated if is_list_of(stated, int) else ())}
    return sorted(token_id for token_id in never if 0 <= token_id < rows)
