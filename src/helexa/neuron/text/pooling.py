"""Pooling of a model's hidden states into one embedding vector.

`mean` uses all positions, `last` the last position and `cls` the first position. The default is `mean`, which works
best for generative models.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from helexa.core.errors import ModelFileError
from helexa.neuron.text.json_file import read_object

Pooling = Literal["mean", "last", "cls"]

POOLING_FILE = "1_Pooling/config.json"
"""File in which Sentence Transformers models define the pooling."""

_DEFAULT: Pooling = "mean"
_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
_MODES: dict[Any, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_GGUF_TYPES: dict[Any, Pooling] = {1: "mean", 2: "cls", 3: "last"}


def pooling_in_directory(path: Path) -> Pooling:
    """Return the pooling defined in a checkpoint directory."""
    try:
        config = read_object(path / POOLING_FILE)
    except ModelFileError:
        return _DEFAULT
    said: list[Pooling] = [pooling for name, pooling in _FLAGS.items() if config.get(name) is True]
    mode = config.get("pooling_mode")
    return said[0] if len(said) == 1 else _MODES.get(mode if isinstance(mode, str) else "", _DEFAULT)


def pooling_in_gguf(metadata: Mapping[str, Any]) -> Pooling:
    """Return the pooling defined in a GGUF file's metadata."""
    said = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return _GGUF_TYPES.get(said if isinstance(said, int) else None, _DEFAULT)
