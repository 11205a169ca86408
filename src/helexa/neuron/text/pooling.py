"""How a model's hidden states become one vector: of which positions it is made.

`mean` of all, of the `last`, or of the first (`cls`). Where a model's maker says nothing it is the mean, which models
that were made to generate stand best.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from helexa.core.errors import ModelFileError
from helexa.neuron.text.json_file import read_object

Pooling = Literal["mean", "last", "cls"]

POOLING_FILE = "1_Pooling/config.json"
"""Where Sentence Transformers say it."""

_DEFAULT: Pooling = "mean"
_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
_MODES: dict[Any, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_GGUF_TYPES: dict[Any, Pooling] = {1: "mean", 2: "cls", 3: "last"}


def pooling_in_directory(path: Path) -> Pooling:
    """What the maker of a checkpoint says."""
    try:
        config = read_object(path / POOLING_FILE)
    except ModelFileError:
        return _DEFAULT
    said: list[Pooling] = [pooling for name, pooling in _FLAGS.items() if config.get(name) is True]
    mode = config.get("pooling_mode")
    return said[0] if len(said) == 1 else _MODES.get(mode if isinstance(mode, str) else "", _DEFAULT)


def pooling_in_gguf(metadata: Mapping[str, Any]) -> Pooling:
    """What a GGUF file's metadata says."""
    said = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return _GGUF_TYPES.get(said if isinstance(said, int) else None, _DEFAULT)
