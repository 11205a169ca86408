"""Read the sampling parameters that a model's publisher recommends.

A value in the request overrides the publisher's value, which overrides the node's default
(`neuron.requests.inference`). Invalid values in a model's files are ignored. `max_new_tokens` is also ignored, because
files usually contain a library's default and not a limit of the model.
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
    """Return the sampling parameters in the `generation_config.json` of the model directory `path`.

    As in `transformers`, `"do_sample": false` means a temperature of 0, even if the file also has a temperature.

    If the file has neither `do_sample` nor a temperature, the result has no temperature. `transformers` would then
    decode greedily. But such a file may list only end tokens, without any recommendation about sampling.
    """
    try:
        config = read_object(path / "generation_config.json")
    except ModelFileError:
        return {}
    greedy: SamplingDefaults = {"temperature": 0.0} if config.get("do_sample") is False else {}
    return _numbers({name: config.get(name) for name in _KEYS}) | greedy


def defaults_in_gguf(metadata: Mapping[str, Any]) -> SamplingDefaults:
    """Return the sampling parameters in a GGUF file's metadata."""
    return _numbers({name: metadata.get(key) for name, key in _KEYS.items()})


def _numbers(values: Mapping[str, Any]) -> SamplingDefaults:
    return {name: value for name, value in values.items() if type(value) in (int, float) and math.isfinite(value)}
