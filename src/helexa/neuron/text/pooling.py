"""Find the pooling method of an embedding model, which combines hidden states into one embedding vector.

`mean` averages the hidden states of all positions, `last` uses the last position, and `cls` uses the first position. If
a model's files specify no method, for example because it is a generative model, the method is `mean`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from helexa.core.errors import ModelFileError
from helexa.neuron.text.json_file import read_object

Pooling = Literal["mean", "last", "cls"]

POOLING_FILE = "1_Pooling/config.json"
"""File in which Sentence Transformers models define the pooling method."""

_DEFAULT: Pooling = "mean"
_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
_MODES: dict[Any, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_GGUF_TYPES: dict[Any, Pooling] = {1: "mean", 2: "cls", 3: "last"}


def pooling_in_directory(path: Path) -> Pooling:
    """Return the pooling method that the model directory `path` specifies.

    Return `mean` if the directory specifies no method or several methods.
    """
    try:
        config = read_object(path / POOLING_FILE)
    except ModelFileError:
        return _DEFAULT
    modes: list[Pooling] = [pooling for name, pooling in _FLAGS.items() if config.get(name) is True]
    mode = config.get("pooling_mode")
    return modes[0] if len(modes) == 1 else _MODES.get(mode if isinstance(mode, str) else "", _DEFAULT)


def pooling_in_gguf(metadata: Mapping[str, Any]) -> Pooling:
    """Return the pooling method in a GGUF file's metadata, or `mean` if the metadata specifies none."""
    pooling_type = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return _GGUF_TYPES.get(pooling_type if isinstance(pooling_type, int) else None, _DEFAULT)
