"""Rotary position embedding: the frequencies of a model, and the cos and sin tables for the positions of a batch."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.ops.protocol import Ops


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a model configuration, with the keys of `rope_parameters` in current transformers.

    Older configurations have `rope_scaling` and top-level keys instead of `rope_parameters`. If a configuration has
    both, the keys of `rope_scaling` override the keys of `rope_parameters`. The result always has
    `rope_type`, `rope_theta` and `partial_rotary_factor`, and all other keys of the configuration's `rope_scaling` or
    `rope_parameters`.

    Raises:
        ModelFileError: the configuration has separate rotary settings for each type of layer.
    """
    older, current = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    scaling = {**current, **older}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ModelFileError(f"config: 'rope_parameters' of {', '.join(scaling)}, expected the same for all layers")
    return {
        **scaling,
        "rope_type": _type(older) or _type(current) or "default",
        "rope_theta": scaling.get("rope_theta") or config.get("rope_theta") or 10000.0,
        "partial_rotary_factor": scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0,
    }


def _type(settings: Mapping[str, Any]) -> Any:
    return settings.get("rope_type") or settings.get("type")


class Rope:
    """The rotary embedding of a model, or of one type of a model's layers.

    The embedding rotates the first R = `partial_rotary_factor` * `head_dim` numbers of each head.

    Args:
        settings: result of `rope_settings`. If `settings` has the key `mrope_section`, positions may have three axes
            (M-RoPE).
        head_dim: width of each head.
        trained_context: training context length to use if `settings` lacks `original_max_position_embeddings`.
        factors: [R / 2], numbers by which the frequencies are divided, from a GGUF file. None to leave the frequencies
            unchanged.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        head_dim: int,
        ops: Ops,
        *,
        trained_context: int = 0,
        factors: Tensor | None = None,
    ) -> None:
        theta = _positive("rope_theta", settings["rope_theta"])
        rope_dim = int(head_dim * _positive("partial_rotary_factor", settings["partial_rotary_factor"]))
        if rope_dim < 2 or rope_dim % 2 or rope_dim > head_dim:
            raise ModelFileError(f"config: 'partial_rotary_factor' rotates {rope_dim} of {head_dim} numbers of a head")
        frequencies = theta ** -(torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
        self._factor = 1.0
        rope_type = settings["rope_type"]
        if rope_type == "linear":
            frequencies /= _positive("factor", settings["factor"])
        elif rope_type == "llama3":
            frequencies = _llama3(frequencies, settings, trained_context)
        elif rope_type == "yarn":
            frequencies, self._factor = _yarn(frequencies, theta, settings, trained_context)
        elif rope_type != "default":
            raise ModelFileError(
                f"rope scaling '{rope_type}' is not supported; supported: default, linear, llama3, yarn"
            )
        if factors is not None:
            if factors.shape != frequencies.shape:
                raise ModelFileError(f"{len(factors)} rope factors for {len(frequencies)} frequencies")
            frequencies /= factors.cpu().double()  # MPS has no float64
        self._ops = ops
        self._frequencies = frequencies.float().to(ops.device)
        self._axes = _axes(settings, rope_dim // 2).to(ops.device)
        self._columns = torch.arange(rope_dim // 2, device=ops.device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cos and the sin of the rotation angles of T rows, each float32 [T, R / 2].

        R is the number of rotated numbers per head.

        Args:
            positions: [T], or [3, T] for positions with time, height and width (M-RoPE).
        """
        if positions.dim() == 1:
            return self._ops.rope_tables(positions, self._frequencies, self._factor)
        by_axis = [self._ops.rope_tables(axis, self._frequencies, self._factor) for axis in positions]
        cos, sin = (
            torch.stack(tables)[self._axes, :, self._columns].T.contiguous() for tables in zip(*by_axis, strict=True)
        )
        return cos, sin


def _axes(settings: Mapping[str, Any], half: int) -> Tensor:
    """Return the position axis of each rotary frequency, int64 [half] (M-RoPE; Wang et al., 2024).

    The axes are 0 for time, 1 for height and 2 for width. The setting `mrope_section` lists the number of frequencies
    of each axis. By default, the frequencies of an axis are contiguous. With `mrope_interleaved`, the axes alternate:
    time, height, width, time and so on. When height or width has reached its number of frequencies, the remaining
    places of this axis go to time.

    Args:
        half: number of frequencies, half of the rotated numbers per head.
    """
    sections = settings.get("mrope_section")
    if sections is None:
        return torch.zeros(half, dtype=torch.int64)
    if len(sections) != 3 or sum(sections) != half or min(sections) < 0:
        raise ModelFileError(f"config: 'mrope_section' is {sections}, expected three counts that add up to {half}")
    if not settings.get("mrope_interleaved"):
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axes = torch.zeros(half, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def _positive(key: str, value: Any) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ModelFileError(f"config: '{key}' is {number}, expected a positive number")
    return number


def _trained(settings: Mapping[str, Any], trained_context: int) -> float:
    key = "original_max_position_embeddings"
    return _positive(key, settings.get(key) or trained_context)


def _llama3(frequencies: Tensor, settings: Mapping[str, Any], trained_context: int) -> Tensor:
    """Return the rotary frequencies scaled by Llama 3.1's rule.

    The rule divides low frequencies by the setting `factor`, leaves high frequencies unchanged, and interpolates for
    the frequencies in between.
    """
    factor = _positive("factor", settings["factor"])
    low, high = _positive("low_freq_factor", settings["low_freq_factor"]), float(settings["high_freq_factor"])
    if not low < high:
        raise ModelFileError(f"config: 'high_freq_factor' is {high}, not above 'low_freq_factor', {low}")
    rotations = _trained(settings, trained_context) * frequencies / (2 * math.pi)
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / factor)


def _yarn(frequencies: Tensor, theta: float, settings: Mapping[str, Any], trained_context: int) -> tuple[Tensor, float]:
    """Return the frequencies scaled by YaRN (Peng et al., 2023), and the factor to multiply cos and sin by.

    YaRN divides low frequencies by the setting `factor`, leaves high frequencies unchanged, and interpolates for the
    frequencies in between. The factor on cos and sin increases attention scores, because long contexts otherwise
    flatten the softmax.
    """
    training_length = _trained(settings, trained_context)
    factor = _positive("factor", settings["factor"] or trained_context / training_length)
    half = frequencies.shape[0]

    def dimension(turns: float) -> float:
        return half * math.log(training_length / (turns * 2 * math.pi)) / math.log(theta)

    low = dimension(float(settings.get("beta_fast") or 32))
    high = dimension(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    interpolation = ((torch.arange(half, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    attention = settings.get("attention_factor")
    if attention is None:
        mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        both_scales = mscale and mscale_all_dim
        attention = (
            _sharpness(factor, mscale) / _sharpness(factor, mscale_all_dim) if both_scales else _sharpness(factor, 1.0)
        )
    return frequencies * (1 - interpolation + interpolation / factor), _positive("attention_factor", attention)


def _sharpness(factor: float, scale: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * float(scale) * math.log(factor) + 1.0
