"""Typed access to the metadata of a GGUF model. This module does not import torch."""

import math
from collections.abc import Mapping
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.header import is_name

_MAX_INTEGER = 2**31 - 1


class Metadata:
    """Metadata of a GGUF model, read by keys without the architecture's prefix.

    For example, the key `block_count` means `llama.block_count` in a model of architecture `llama`.

    Attributes:
        architecture: the value of `general.architecture`.

    Raises:
        ModelFileError: a key without a default is missing, or a value is invalid. The message names the key. All
            methods raise this error.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = file.architecture
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._file.metadata

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return the integer at `key`, which must be at least `least`. Return `default` if the key is missing.

        A list with one integer per layer is accepted if all its integers are equal.
        """
        value = self._value(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(value) is not int or not least <= value <= _MAX_INTEGER:
            raise self.error(key, f"is not one whole number from {least} to {_MAX_INTEGER}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the positive finite number at `key`, or `default` if the key is missing."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, "is not a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean at `key`, or `default` if the key is missing."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, "is neither true nor false")
        return value

    def text(self, key: str, default: str) -> str:
        """Return the string at `key`, or `default` if the key is missing.

        The string must be printable and short, so that an error message can contain it.
        """
        value = self._value(key, default)
        if not is_name(value):
            raise self.error(key, "is not a name")
        return value

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """Return the booleans for the first `layers` layers from the list at `key`.

        Return None if the key is missing or its value is not a list.
        """
        value = self._value(key, False)
        if not isinstance(value, list):
            return None
        if len(value) < layers or not all(type(flag) in (bool, int) for flag in value):
            raise self.error(key, f"is not a list of a boolean for each of {layers} layers")
        return [bool(flag) for flag in value[:layers]]

    def require_neutral(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Check the values of keys that change the computation of a model but are not implemented.

        Args:
            neutral: for each key, the values that do not change the computation. Keys that another method has read are
                not checked.
        """
        for key, values in neutral.items():
            value = self._file.metadata.get(f"{self.architecture}.{key}", values[0])
            if key not in self._read and value not in values:
                shown = value if isinstance(value, bool | int | float) else "not a number"
                raise self.error(key, f"is {shown}, which is not supported for this architecture")

    def token(self, kind: str) -> int | None:
        """Return the id of the `bos` or `eos` token, or None if the file does not specify it.

        Args:
            kind: `bos` or `eos`.
        """
        value = self._file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value <= _MAX_INTEGER):
            raise ModelFileError(f"{self._file.path.name}: key tokenizer.ggml.{kind}_token_id is not a token id")
        return value

    def error(self, key: str, problem: str) -> ModelFileError:
        """Return an error whose message names the file and the key, followed by `problem`."""
        return ModelFileError(f"{self._file.path.name}: key {self.architecture}.{key} {problem}")

    def _value(self, key: str, default: Any) -> Any:
        self._read.add(key)
        value = self._file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.error(key, "is missing")
        return value
