"""How a model's maker recommends to sample from it.

The precedence is: the request's value, then these values, then the node's fallbacks (`neuron.requests.inference`). An
absent or invalid value falls back. `max_new_tokens` is ignored, as it is a library's default and no limit of the model;
the tokenizer knows the end tokens.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.text.json_file import read_object

SamplingDefaults = dict[str, float | int]
"""Some of `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty`."""

# Our name, and the name in a GGUF file's metadata; generation_config.json uses ours.
_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def defaults_in_directory(path: Path) -> SamplingDefaults:
    """What `generation_config.json` says.

    `"do_sample": false` is a temperature of 0, whatever temperature stands beside it: `transformers`, whose file this
    is, reads it so. Where it is absent nothing follows, though `transformers` would not sample then either: a file that
    only names end tokens says nothing about sampling.
    """
    try:
        config = read_object(path / "generation_config.json")
    except ModelFileError:
        return {}
    greedy: SamplingDefaults = {"temperature": 0.0} if config.get("do_sample") is False else {}
    return _numbers({name: config.get(name) for name in _KEYS}) | greedy


def defaults_in_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """What a GGUF file's metadata says."""
    return _numbers({name: metadata.get(key) for name, key in _KEYS.items()})


def _numbers(values: Mapping[str, Any]) -> SamplingDefaults:
    return {name: value for name, value in values.items() if type(value) in (int, float) and math.isfinite(value)}
