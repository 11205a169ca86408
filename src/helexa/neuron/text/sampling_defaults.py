"""Sampling parameters recommended by a model's publisher.

Precedence: the request's value, then the publisher's value, then the node's fallback (`neuron.requests.inference`). A
missing or invalid value is skipped. `max_new_tokens` is ignored, because it is a library's default and not a limit of
the model.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helexa.core.errors import ModelFileError
from helexa.neuron.text.json_file import read_object

SamplingDefaults = dict[str, float | int]
"""Values by parameter name: any of `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty`."""

# Parameter name, and its key in a GGUF file's metadata; generation_config.json uses the parameter name.
_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def defaults_in_directory(path: Path) -> SamplingDefaults:
    """Return the sampling defaults in `generation_config.json`.

    `"do_sample": false` means a temperature of 0, even if the file also has a temperature, as in `transformers`.
    Without `do_sample`, the temperature stays undefined. `transformers` would not sample in this case, but a file that
    only names end tokens gives no sampling recommendation.
    """
    try:
        config = read_object(path / "generation_config.json")
    except ModelFileError:
        return {}
    greedy: SamplingDefaults = {"temperature": 0.0} if config.get("do_sample") is False else {}
    return _numbers({name: config.get(name) for name in _KEYS}) | greedy


def defaults_in_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """Return the sampling defaults in a GGUF file's metadata."""
    return _numbers({name: metadata.get(key) for name, key in _KEYS.items()})


def _numbers(values: Mapping[str, Any]) -> SamplingDefaults:
    return {name: value for name, value in values.items() if type(value) in (int, float) and math.isfinite(value)}
