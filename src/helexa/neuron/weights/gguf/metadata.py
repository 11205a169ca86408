"""Typed access to the metadata of a GGUF model, without torch."""

import math
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.files import GgufFile
from helexa.neuron.weights.gguf.header import is_name

_MAX_INTEGER = 2**31 - 1


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
        """Return an integer of at least `least`, or `default` if the key is missing.

        A list with one value per layer is accepted if all values are equal.
        """
        value = self._value(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(value) is not int or not least <= value <= _MAX_INTEGER:
            raise self.error(key, f"is not one whole number from {least} to {_MAX_INTEGER}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive finite number, or `default` if the key is missing."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, "is not a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean, or `default` if the key is missing."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, "is neither true nor false")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string that is safe to show in an error message, or `default` if the key is missing."""
        value = self._value(key, default)
        if not is_name(value):
            raise self.error(key, "is not a name")
        return value

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """Return one boolean for each of the first `layers` layers, or None if the file has no list."""
        value = self._value(key, False)
        if not isinstance(value, list):
            return None
        if len(value) < layers or not all(type(flag) in (bool, int) for flag in value):
            raise self.error(key, f"is not a list of a boolean for each of {layers} layers")
        return [bool(flag) for flag in value[:layers]]

    def token(self, kind: str) -> int | None:
        """Return the token id of `kind`, which is `bos` or `eos`; None if the file has no such token."""
        value = self._file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value <= _MAX_INTEGER):
            raise ModelFileError(f"{self._file.path.name}: key tokenizer.ggml.{kind}_token_id is not a token id")
        return value

    def error(self, key: str, problem: str) -> ModelFileError:
        """Return an error whose message names the file and the key, followed by `problem`."""
        return ModelFileError(f"{self._file.path.name}: key {self.architecture}.{key} {problem}")

    def _value(self, key: str, default: Any) -> Any:
        value = self._file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.error(key, "is missing")
        return value
