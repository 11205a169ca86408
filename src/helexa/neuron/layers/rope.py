"""Rotary position embedding: the frequencies of a model, and the tables of one step."""

import math
from typing import Any

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.ops.reference import ReferenceOps


class Rope:
    """Frequencies of one model.

    Args:
        config: Hugging Face names: `rope_theta`, `rope_scaling` or `rope_parameters`.
        head_dim: D, all of which is rotated.
        factors: [D / 2] divisors of the frequencies, as some GGUF files carry them.
    """

    def __init__(self, config: dict[str, Any], head_dim: int, ops: ReferenceOps, factors: Tensor | None = None) -> None:
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = _positive("rope_theta", scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
        frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "linear":
            frequencies /= _positive("factor", scaling["factor"])
        elif kind == "llama3":
            frequencies = _llama3(frequencies, scaling)
        elif kind != "default":
            raise ModelFileError(f"rope scaling '{kind}' is not supported; supported: default, linear, llama3")
        if factors is not None:
            frequencies /= factors.double().cpu()
        self._ops = ops
        self._frequencies = frequencies.float().to(ops.device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [T], each float32 [T, D / 2]."""
        return self._ops.rope_tables(positions, self._frequencies)


def _positive(key: str, value: Any) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ModelFileError(f"config: '{key}' is {number}, expected a positive number")
    return number


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1's rule: long wavelengths are stretched, short ones kept, those between interpolated."""
    factor = _positive("factor", scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    turns = trained * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / factor)
