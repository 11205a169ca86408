"""Quantization formats to which weights can be converted during loading, and the names of these formats."""

from dataclasses import dataclass

from helexa.core.errors import HelexaError


@dataclass(frozen=True)
class QuantForm:
    """Format of the codes and scales of a quantized matrix (see `GroupwiseTensor`).

    Attributes:
        name: name of the format. It is derived from the name of the equivalent ggml type, for example `q4k` from Q4_K.
        bits: bits per code.
        group_size: number of columns that share a scale.
        minimum: whether each group has a minimum. Without minimums, the middle code represents the value 0.
        stretch: number of columns, in several groups, that share a float16 unit. The scale of each group is then a
            small integer times the unit. None if each scale is a float16 number without a shared unit.
        weight_bits: bits per weight, including a weight's share of the scales.
    """

    name: str
    bits: int
    group_size: int
    minimum: bool
    stretch: int | None
    weight_bits: float

    @property
    def zero(self) -> int:
        """The code that represents the value 0, before the minimum is added."""
        return 0 if self.minimum else 1 << (self.bits - 1)

    def fits(self, columns: int) -> bool:
        """Return whether a row of `columns` columns can be divided into whole groups and whole stretches."""
        return columns % (self.stretch or self.group_size) == 0


FORMS = {
    form.name: form
    for form in (
        QuantForm("q4_0", 4, 32, False, None, 4.5),
        QuantForm("q4_1", 4, 32, True, None, 5.0),
        QuantForm("q5_0", 5, 32, False, None, 5.5),
        QuantForm("q5_1", 5, 32, True, None, 6.0),
        QuantForm("q8_0", 8, 32, False, None, 8.5),
        QuantForm("q4k", 4, 32, True, 256, 4.5),
        QuantForm("q5k", 5, 32, True, 256, 5.5),
        QuantForm("q6k", 6, 16, False, 256, 6.5625),
    )
}
"""Quantization formats by name."""

AUTO = "auto"
PLAIN = ("bf16", "f16", "f32")
NAMES = (AUTO, "q4k", "q5k", "q6k", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", *PLAIN)
"""Names of quantizations: `auto`, the names of the formats, and the names in `PLAIN`, which mean no quantization."""

# Names that have no format, and map to the next format with more bits.
_WITH_MORE_BITS = {"q2k": "q4k", "q3k": "q4k"}
# Aliases of the formats.
_ALIASES = {
    "q4": "q4k",
    "q4km": "q4k",
    "q4ks": "q4k",
    "q5": "q5k",
    "q5km": "q5k",
    "q5ks": "q5k",
    "q6": "q6k",
    "q8": "q8_0",
    "q81": "q8_0",
    "q8k": "q8_0",
    **_WITH_MORE_BITS,
}
_BY_PLAIN_NAME = {name.replace("_", ""): name for name in NAMES} | _ALIASES


def quant_named(text: str) -> str:
    """Return the name in `NAMES` of the quantization `text`. `text` may be an alias such as `q4`.

    Case and underscores in `text` are ignored.

    Raises:
        HelexaError: `text` is not the name of a quantization.
    """
    name = _find_name(text)
    if name is None:
        raise HelexaError(f"unknown quantization '{text[:40]}'; known: {', '.join(NAMES)}")
    return name


def has_more_bits(text: str) -> bool:
    """Return whether `quant_named` returns a format with more bits than the quantization `text` has."""
    return _plain_name(text) in _WITH_MORE_BITS


def share_left(text: str) -> float:
    """Return the approximate size of weights after the quantization `text`, relative to 16-bit weights.

    For `auto`, return the smallest ratio that `auto` can choose.

    Raises:
        HelexaError: `text` is not the name of a quantization.
    """
    quant = quant_named(text)
    return 1.0 if quant in PLAIN else FORMS["q4k" if quant == AUTO else quant].weight_bits / 16


def is_quant(text: str) -> bool:
    """Return whether `text` is the name or an alias of a quantization. Case and underscores are ignored."""
    return _find_name(text) is not None


def _find_name(text: str) -> str | None:
    return _BY_PLAIN_NAME.get(_plain_name(text))


def _plain_name(text: str) -> str:
    return text.lower().replace("_", "")
