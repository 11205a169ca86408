"""Typed access to the metadata of a GGUF model, without torch."""

import math
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.header import is_name

_LARGEST = 2**31 - 1


class Metadata:
    """Metadata of a GGUF model; keys are relative to the architecture's prefix.

    Attributes:
        architecture: the value of `general.architecture`.

    Raises:
        ModelFileError: a key is missing or has the wrong type; the message names the key.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.architecture = file.architecture

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._file.metadata

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return `key` as an integer of at least `least`; a list of one value per layer must have equal values."""
        value = self._value(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(value) is not int or not least <= value <= _LARGEST:
            raise self.wrong(key, f"is not one whole number from {least} to {_LARGEST}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, "is not a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "is neither true nor false")
        return value

    def word(self, key: str, default: str) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not is_name(value):
            raise self.wrong(key, "is not a name")
        return value

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """Return one boolean for each of the first `layers` layers, or None if the file has no list."""
        value = self._value(key, False)
        if not isinstance(value, list):
            return None
        if len(value) < layers or not all(type(flag) in (bool, int) for flag in value):
            raise self.wrong(key, f"does not say yes or no of each of {layers} layers")
        return [bool(flag) for flag in value[:layers]]

    def token(self, kind: str) -> int | None:
        """Return the token id of kind `bos` or `eos`, or None."""
        value = self._file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value <= _LARGEST):
            raise ModelFileError(f"{self._file.path.name}: key tokenizer.ggml.{kind}_token_id is not a token's id")
        return value

    def wrong(self, key: str, problem: str) -> ModelFileError:
        """Return an error that names the key."""
        return ModelFileError(f"{self._file.path.name}: key {self.architecture}.{key} {problem}")

    def _value(self, key: str, default: Any) -> Any:
        value = self._file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.wrong(key, "is missing")
        return value
