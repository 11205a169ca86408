"""Load-time quantization: formats, their names, and the choice per tensor.

docs/quantization.md gives the reasons for the choices. This module does not import torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from helexa.core.errors import HelexaError

# Quantizable matrices of text models, which contain most weights. All other tensors stay unchanged: norms, biases,
# routers, gates of shared experts, convolutions, decays, sinks.
_MATRIX = re.compile(
    r"(?:model\.layers\.(?P<layer>\d+)\.)?(?:[\w.]+\.)?"
    r"(?P<module>\w+_proj|in_proj_(?:qkv|qkvz|z)|per_layer_(?:input_gate|projection)|embed_tokens(?:_per_layer)?|lm_head)"
    r"(?:\.weight)?(?:#\d+)?",
    re.ASCII,
)
_SENSITIVE = ("down_proj", "v_proj")  # these modules get a format with more bits in the first and last layers
_VOCABULARY = ("embed_tokens", "embed_tokens_per_layer", "lm_head")
_EDGE = 8  # in the first 1/8 and the last 1/8 of the layers, `_SENSITIVE` modules get more bits

_BETTER = {"q4_0": "q6k", "q4_1": "q6k", "q4k": "q6k", "q5_0": "q6k", "q5_1": "q6k", "q5k": "q6k", "q6k": "q8_0"}
# Replacements for matrices whose rows do not divide into whole stretches (see `QuantFormat.stretch`).
_BY_GROUPS = {"q4k": "q4_1", "q5k": "q5_1", "q6k": "q8_0"}

_AUTOMATIC = ("bf16", "q8_0", "q6k", "q4k")  # candidates for `auto`, from the most precise to the smallest
_MAX_MEMORY_SHARE = 0.5  # maximum share of the free memory that the weights may take

_TOWER_FORMAT = "q8_0"
# Quantizable matrices of vision towers.
_TOWER_MATRIX = re.compile(
    r"(?:blocks|encoder\.layers)\.\d+\."
    r"(?:attn\.(?:qkv|q|k|v|proj)|self_attn\.(?:[qkv]|out)_proj|mlp\.\w+)\.weight",
    re.ASCII,
)


@dataclass(frozen=True)
class QuantFormat:
    """Format of the codes and scales of a quantized matrix (see `GroupwiseTensor`)."""

    # Name of the format. It is derived from the name of the equivalent ggml type, for example `q4k` from Q4_K.
    name: str
    bits: int  # bits per code
    group_size: int  # number of columns that share a scale
    minimum: bool  # whether each group has a minimum. Without minimums, the middle code represents the value 0.
    # Number of columns, in several groups, that share a float16 unit. The scale of each group is then a small integer
    # times the unit. None if each scale is a float16 number without a shared unit.
    stretch: int | None
    weight_bits: float  # bits per weight, including a weight's share of the scales

    @property
    def zero(self) -> int:
        """The code that represents the value 0, before the minimum is added."""
        return 0 if self.minimum else 1 << (self.bits - 1)

    def fits(self, columns: int) -> bool:
        """Return whether `columns` divides into whole groups and whole stretches."""
        return columns % (self.stretch or self.group_size) == 0


# Quantization formats by name.
QUANT_FORMATS = {
    quant_format.name: quant_format
    for quant_format in (
        QuantFormat("q4_0", 4, 32, False, None, 4.5),
        QuantFormat("q4_1", 4, 32, True, None, 5.0),
        QuantFormat("q5_0", 5, 32, False, None, 5.5),
        QuantFormat("q5_1", 5, 32, True, None, 6.0),
        QuantFormat("q8_0", 8, 32, False, None, 8.5),
        QuantFormat("q4k", 4, 32, True, 256, 4.5),
        QuantFormat("q5k", 5, 32, True, 256, 5.5),
        QuantFormat("q6k", 6, 16, False, 256, 6.5625),
    )
}
AUTO = "auto"
PLAIN = ("bf16", "f16", "f32")
# Names of quantizations: `auto`, the names of the formats, and the names in `PLAIN`, which mean no quantization.
NAMES = (AUTO, "q4k", "q5k", "q6k", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", *PLAIN)
# Names without a format of their own, and the format with more bits that replaces each of them.
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
    """Return the name in `NAMES` of a quantization or of an alias such as `q4`.

    Case and underscores in `text` are ignored.

    Raises:
        HelexaError: `text` is not the name of a quantization.
    """
    name = _find_name(text)
    if name is None:
        raise HelexaError(f"unknown quantization '{text[:40]}'; known: {', '.join(NAMES)}")
    return name


def has_more_bits(text: str) -> bool:
    """Return whether `quant_named` replaces `text` by a format with more bits."""
    return _plain_name(text) in _WITH_MORE_BITS


def share_left(text: str) -> float:
    """Return the approximate size of quantized weights, relative to 16-bit weights.

    The size for `auto` is the size for q4k. The size for all names in `PLAIN` is 1.

    Raises:
        HelexaError: `text` is not the name of a quantization.
    """
    quant = quant_named(text)
    # For `auto`, use the smallest format that `automatic` can choose.
    return 1.0 if quant in PLAIN else QUANT_FORMATS["q4k" if quant == AUTO else quant].weight_bits / 16


def is_quant(text: str) -> bool:
    """Return whether `text` is a quantization's name or alias, as for `quant_named`."""
    return _find_name(text) is not None


def _find_name(text: str) -> str | None:
    return _BY_PLAIN_NAME.get(_plain_name(text))


def _plain_name(text: str) -> str:
    return text.lower().replace("_", "")


class QuantPolicy:
    """Chooses a quantization format for each matrix of one model.

    Args:
        quant: a name in `NAMES` except `auto`. An empty string means no quantization.
        layers: number of layers of the model.
    """

    def __init__(self, quant: str, layers: int) -> None:
        self.quant = "" if quant in PLAIN else quant
        self._layers = layers

    def format_of(self, name: str, columns: int) -> QuantFormat | None:
        """Return the format for the matrix `name`, or None if the matrix is not quantized.

        Args:
            name: tensor name in the checkpoint. If the tensor is a stack of experts, the suffix `#7` selects the matrix
                of expert 7.
        """
        match = _MATRIX.fullmatch(name) if self.quant else None
        if match is None:
            return None
        chosen = self.quant
        # Embedding and output head get at least q6k, because their errors affect every token.
        if match["module"] in _VOCABULARY:
            chosen = chosen if QUANT_FORMATS[chosen].bits > QUANT_FORMATS["q6k"].bits else "q6k"
        elif match["module"] in _SENSITIVE and self._at_edge(int(match["layer"] or 0)):
            chosen = _BETTER.get(chosen, chosen)
        while not QUANT_FORMATS[chosen].fits(columns):
            if chosen not in _BY_GROUPS:
                return None
            chosen = _BY_GROUPS[chosen]
        return QUANT_FORMATS[chosen]

    def weight_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """Return the size of weights in memory, in bytes; `shapes` has shapes by name.

        Weights that this policy does not quantize count as bfloat16.
        """
        total = 0.0
        for name, shape in shapes.items():
            count = 1
            for size in shape:
                count *= size
            quant_format = self.format_of(name, shape[-1]) if len(shape) > 1 else None
            # Weights that this policy does not quantize count as bfloat16.
            total += count * (16 if quant_format is None else quant_format.weight_bits) / 8
        return total

    def _at_edge(self, layer: int) -> bool:
        edge = -(-self._layers // _EDGE)
        return layer < edge or layer >= self._layers - edge


def automatic(shapes: Mapping[str, tuple[int, ...]], layers: int, file_bytes: int, free_bytes: int) -> str:
    """Return the quantization for `auto`: bf16, q8_0, q6k or q4k.

    The result is the most precise one whose weights take at most half of `free_bytes`, or q4k if none does.

    Args:
        shapes: shapes of the checkpoint's tensors by name.
        file_bytes: size of the tensors in the files, in bytes.
        free_bytes: free memory, in bytes.
    """
    budget = _MAX_MEMORY_SHARE * free_bytes
    if file_bytes <= budget:
        return _AUTOMATIC[0]
    fitting = (quant for quant in _AUTOMATIC if QuantPolicy(quant, layers).weight_bytes(shapes) <= budget)
    # If no candidate is small enough, return the smallest candidate. The load then reports what does not fit.
    return next(fitting, _AUTOMATIC[-1])


class VisionQuantPolicy(QuantPolicy):
    """Chooses q8_0 for a vision tower's encoder layers if the text model is quantized."""

    def __init__(self, quant: str) -> None:
        super().__init__(quant, layers=0)

    def format_of(self, name: str, columns: int) -> QuantFormat | None:
        """Return the format for the matrix `name`, or None if the matrix is not quantized."""
        # The format has 8 bits, because the tower is small compared with the text model, and its errors change the
        # input of the text model. Matrices outside the layers have few weights.
        quant_format = QUANT_FORMATS[_TOWER_FORMAT]
        return quant_format if self.quant and _TOWER_MATRIX.fullmatch(name) and quant_format.fits(columns) else None
