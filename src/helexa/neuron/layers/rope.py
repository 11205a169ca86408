"""Rotary position embedding: frequencies, and cos and sin tables of a batch."""

import math
from collections.abc import Mapping
from typing import Any

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron import tensors
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.linear_and_norm_operators import QueryTemperature
from helexa.neuron.tensors import Tensor


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a configuration, with transformers' current keys.

    Raises:
        ModelFileError: the rotary settings are not an object.
        UnsupportedModelError: the configuration has separate rotary settings for each type of layer.
    """
    # Older configurations have the object `rope_scaling`, and keys such as `rope_theta` at the top level. Current
    # configurations have the object `rope_parameters`. If both objects exist, the keys of `rope_scaling` take
    # precedence.
    older, current = (_object(config, key) for key in ("rope_scaling", "rope_parameters"))
    scaling = {**current, **older}
    if separate := [name for name, value in scaling.items() if isinstance(value, Mapping)]:
        raise UnsupportedModelError(
            f"config: 'rope_parameters' has separate settings for {', '.join(separate)}, expected the same settings "
            "for all layers"
        )
    return {
        **scaling,
        "rope_type": _type(older) or _type(current) or "default",
        "rope_theta": scaling.get("rope_theta") or config.get("rope_theta") or 10000.0,
        "partial_rotary_factor": scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0,
    }


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelFileError(f"config: '{key}' is {str(value)[:40]!r}, expected an object")
    return value


def _type(settings: Mapping[str, Any]) -> Any:
    return settings.get("rope_type") or settings.get("type")


class Rope:
    """The rotary embedding of a model, or of one type of a model's layers.

    The embedding rotates the first R = `partial_rotary_factor` * `head_dim` numbers of each head. With the type
    `proportional`, R is `head_dim`, but only this share of the pairs, the first ones, has angles other than 0.

    Args:
        settings: result of `rope_settings`. With the key `mrope_section`, positions may have three axes (M-RoPE).
        served_context: number of positions that the engine offers. It selects the factors of LongRoPE.
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
        served_context: int = 0,
        factors: Tensor | None = None,
    ) -> None:
        theta = _positive("rope_theta", settings["rope_theta"])
        rotated = int(head_dim * _positive("partial_rotary_factor", settings["partial_rotary_factor"]))
        rope_type = settings["rope_type"]
        rope_dim = head_dim if rope_type == "proportional" else rotated
        if rope_dim < 2 or rope_dim % 2 or rope_dim > head_dim:
            raise ModelFileError(
                f"config: 'partial_rotary_factor' rotates {rope_dim} numbers of each head, expected an even number "
                f"from 2 to {head_dim}"
            )
        # The frequencies are computed in float64, because the effect of a rounding error grows with the position.
        frequencies = theta ** -(tensors.arange(0, rope_dim, 2, dtype=tensors.float64) / rope_dim)
        self._factor = 1.0
        if rope_type == "linear":
            frequencies /= _positive("factor", settings["factor"])
        elif rope_type == "llama3":
            frequencies = _llama3(frequencies, settings, trained_context)
        elif rope_type == "yarn":
            frequencies, self._factor = _yarn(frequencies, theta, settings, trained_context)
        elif rope_type == "proportional":  # numbers i and i + head_dim / 2 form a pair; only the first pairs rotate
            frequencies /= _positive("factor", settings.get("factor") or 1.0)
            frequencies[rotated // 2 :] = 0.0
        elif rope_type == "longrope":
            frequencies, self._factor = _longrope(frequencies, settings, trained_context, served_context)
        elif rope_type != "default":
            raise UnsupportedModelError(
                f"rope scaling '{rope_type}' is not supported; supported: default, linear, llama3, longrope, "
                "proportional, yarn"
            )
        if factors is not None:
            if factors.shape != frequencies.shape:
                raise ModelFileError(
                    f"tensor rope_freqs.weight has {len(factors)} numbers, but the configuration requires "
                    f"{len(frequencies)}"
                )
            frequencies /= factors.cpu().double()  # on the CPU, because MPS has no float64
        self.rotated = rope_dim  # R, the number of rotated numbers of each head
        self._ops = ops
        self._frequencies = frequencies.float().to(ops.device)
        self._axes = _axes(settings, rope_dim // 2).to(ops.device)
        self._columns = tensors.arange(rope_dim // 2, device=ops.device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles of T rows, each float32 [T, R / 2].

        Args:
            positions: [T], or [3, T] for positions with time, height and width (M-RoPE).
        """
        if positions.dim() == 1:
            return self._ops.rope_tables(positions, self._frequencies, self._factor)
        by_axis = [self._ops.rope_tables(axis, self._frequencies, self._factor) for axis in positions]
        cos, sin = (
            tensors.stack(tables)[self._axes, :, self._columns].T.contiguous() for tables in zip(*by_axis, strict=True)
        )
        return cos, sin


def query_temperature(settings: Mapping[str, Any]) -> QueryTemperature:
    """Return the factor on queries that grows with their position.

    `settings` is the result of `rope_settings`.

    Raises:
        ModelFileError: a setting is missing or is not a positive number.
    """
    beta, length = "llama_4_scaling_beta", "original_max_position_embeddings"
    for key in (beta, length):
        if settings.get(key) is None:
            raise ModelFileError(f"config: '{key}' is missing in 'rope_parameters'")
    return QueryTemperature(_positive(beta, settings[beta]), int(_positive(length, settings[length])))


def no_rotation(head_dim: int, ops: Ops) -> Rope:
    """Return a rotary embedding that rotates nothing, for layers with NoPE."""
    settings = {"rope_type": "default", "rope_theta": 1.0, "partial_rotary_factor": 1.0}
    # Frequencies divided by infinity are 0, so all kernels rotate by an angle of 0.
    return Rope(settings, head_dim, ops, factors=tensors.full((head_dim // 2,), math.inf))


def _axes(settings: Mapping[str, Any], half: int) -> Tensor:
    """Return the axis of each frequency, int64 [half] (M-RoPE; Wang et al., 2024).

    The axes are 0 for time, 1 for height and 2 for width. The setting `mrope_section` lists the number of frequencies
    of each axis. By default, the frequencies of an axis are contiguous.
    """
    sections = settings.get("mrope_section")
    if sections is None:
        return tensors.zeros(half, dtype=tensors.int64)
    if len(sections) != 3 or sum(sections) != half or min(sections) < 0:
        raise ModelFileError(f"config: 'mrope_section' is {sections}, expected three counts that add up to {half}")
    if not settings.get("mrope_interleaved"):
        return tensors.arange(3).repeat_interleave(tensors.tensor(sections))
    # The axes alternate: time, height, width, time, and so on. When height or width has all of its frequencies, time
    # gets the remaining places of this axis.
    axes = tensors.zeros(half, dtype=tensors.int64)
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
    """Return the frequencies scaled by Llama 3.1's rule."""
    factor = _positive("factor", settings["factor"])
    low, high = _positive("low_freq_factor", settings["low_freq_factor"]), float(settings["high_freq_factor"])
    if not low < high:
        raise ModelFileError(f"config: 'high_freq_factor' is {high}, expected more than 'low_freq_factor', {low}")
    rotations = _trained(settings, trained_context) * frequencies / (2 * math.pi)
    # Low frequencies are divided by `factor`, high frequencies stay, and frequencies in between are interpolated.
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / factor)


def _yarn(frequencies: Tensor, theta: float, settings: Mapping[str, Any], trained_context: int) -> tuple[Tensor, float]:
    """Return YaRN's frequencies (Peng et al., 2023), and its factor on cos and sin."""
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
    # Low frequencies are divided by `factor`, high frequencies stay, and frequencies in between are interpolated.
    interpolation = ((tensors.arange(half, dtype=tensors.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    # The factor on cos and sin increases attention scores, because long contexts otherwise flatten the softmax.
    attention = settings.get("attention_factor")
    if attention is None:
        mscale, mscale_all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        both_scales = mscale and mscale_all_dim
        attention = (
            _sharpness(factor, mscale) / _sharpness(factor, mscale_all_dim) if both_scales else _sharpness(factor, 1.0)
        )
    return frequencies * (1 - interpolation + interpolation / factor), _positive("attention_factor", attention)


def _longrope(
    frequencies: Tensor, settings: Mapping[str, Any], trained_context: int, served_context: int
) -> tuple[Tensor, float]:
    """Return LongRoPE's frequencies (Ding et al., 2024) and its factor on cos and sin."""
    # LongRoPE divides each frequency by a factor from one of two lists. transformers selects the list by the length of
    # each sequence. Here the list depends only on the served context, because the cached keys of a shared prefix must
    # not depend on the sequences that continue the prefix.
    original = _trained(settings, trained_context)
    name = "long_factor" if served_context > original else "short_factor"
    factors = settings.get(name)
    if not isinstance(factors, list) or len(factors) != frequencies.shape[0]:
        raise ModelFileError(
            f"config: '{name}' is {str(factors)[:80]}, expected a list of {frequencies.shape[0]} numbers, one per "
            "frequency"
        )
    attention = settings.get("attention_factor")
    if attention is None:
        factor = _positive("factor", settings.get("factor") or trained_context / original)
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    divisors = tensors.tensor([_positive(name, number) for number in factors], dtype=tensors.float64)
    return frequencies / divisors, _positive("attention_factor", attention)


def _sharpness(factor: float, scale: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * float(scale) * math.log(factor) + 1.0
