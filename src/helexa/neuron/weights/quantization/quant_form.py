"""The forms in which a matrix can be quantised at load, and the names that they go by."""

from dataclasses import dataclass

from helexa.core.errors import HelexaError


@dataclass(frozen=True)
class QuantForm:
    """How codes and scales of a quantised matrix are kept (see `GroupwiseTensor`).

    Attributes:
        name: that of ggml's type of the same form.
        bits: of each code.
        group_size: columns that share a scale.
        minimum: each group has a minimum as well; else the middle code stands for nought.
        stretch: columns that share a float16 unit, of which the scale of a group is a small multiple; None where each
            scale is a float16.
        weight_bits: what a weight takes with its part of the scales.
    """

    name: str
    bits: int
    group_size: int
    minimum: bool
    stretch: int | None
    weight_bits: float

    @property
    def zero(self) -> int:
        """The code that stands for nought, before the minimum."""
        return 0 if self.minimum else 1 << (self.bits - 1)

    def fits(self, columns: int) -> bool:
        """Whether rows of so many columns divide into whole stretches and groups."""
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
"""By name."""

AUTO = "auto"
PLAIN = ("bf16", "f16", "f32")
NAMES = (AUTO, "q4k", "q5k", "q6k", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", *PLAIN)
"""What `quant_named` returns: as memory allows, a form, or nothing quantised."""

# Other names of the same; what has no form of its own here gets the next that is no worse.
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
    "q2k": "q4k",
    "q3k": "q4k",
}
_MEANT = {name.replace("_", ""): name for name in NAMES} | _ALIASES


def quant_named(text: str) -> str:
    """The one of `NAMES` that `text` means; case and underscores do not matter.

    Raises:
        HelexaError: it is none.
    """
    meant = _meant(text)
    if meant is None:
        raise HelexaError(f"unknown quantisation '{text[:40]}'; known: {', '.join(NAMES)}")
    return meant


def share_left(text: str) -> float:
    """Of what weights of 16 bits take, about how much is left when they are quantised so; by `auto`, at least.

    Raises:
        HelexaError: it is no name of a quantisation.
    """
    quant = quant_named(text)
    return 1.0 if quant in PLAIN else FORMS["q4k" if quant == AUTO else quant].weight_bits / 16


def is_quant(text: str) -> bool:
    """Whether `quant_named` knows it."""
    return _meant(text) is not None


def _meant(text: str) -> str | None:
    return _MEANT.get(text.lower().replace("_", ""))
