"""Choose the load-time quantization of each tensor. docs/quantization.md gives the reasons for the choices."""

import re
from collections.abc import Mapping

from helexa.neuron.weights.quantization.quant_form import FORMS, PLAIN, QuantForm

# Quantizable matrices, which contain most weights. All other tensors stay unchanged: norms, biases, routers, gates of
# shared experts, convolutions, decays, sinks.
_MATRIX = re.compile(
    r"(?:model\.layers\.(?P<layer>\d+)\.)?(?:[\w.]+\.)?"
    r"(?P<module>\w+_proj|in_proj_(?:qkv|qkvz|z)|embed_tokens|lm_head)(?:\.weight)?(?:#\d+)?",
    re.ASCII,
)
_SENSITIVE = ("down_proj", "v_proj")  # these modules get a format with more bits in the first and last layers
_VOCABULARY = ("embed_tokens", "lm_head")
_EDGE = 8  # the first 1/8 and the last 1/8 of the layers get the better formats

_BETTER = {"q4_0": "q6k", "q4_1": "q6k", "q4k": "q6k", "q5_0": "q6k", "q5_1": "q6k", "q5k": "q6k", "q6k": "q8_0"}
_BY_GROUPS = {"q4k": "q4_1", "q5k": "q5_1", "q6k": "q8_0"}  # used if rows do not divide into stretches

_AUTOMATIC = ("bf16", "q8_0", "q6k", "q4k")
_MAX_MEMORY_SHARE = 0.5  # maximum share of the free memory that the weights may take


class QuantPolicy:
    """Chooses a quantization format for each matrix of one model.

    Args:
        quant: a name in `NAMES` except `auto`. An empty string means no quantization.
        layers: number of layers of the model.
    """

    def __init__(self, quant: str, layers: int) -> None:
        self.quant = "" if quant in PLAIN else quant
        self._layers = layers

    def form(self, name: str, columns: int) -> QuantForm | None:
        """Return the format for the matrix `name`, or None if the matrix is not quantized.

        Args:
            name: tensor name in the checkpoint. If the tensor is a stack of experts, the suffix `#7` selects the matrix
                of expert 7.
            columns: number of columns of the matrix.
        """
        match = _MATRIX.fullmatch(name) if self.quant else None
        if match is None:
            return None
        form = self.quant
        if match["module"] in _VOCABULARY:
            form = form if FORMS[form].bits > FORMS["q6k"].bits else "q6k"
        elif match["module"] in _SENSITIVE and self._at_edge(int(match["layer"] or 0)):
            form = _BETTER.get(form, form)
        while not FORMS[form].fits(columns):
            if form not in _BY_GROUPS:
                return None
            form = _BY_GROUPS[form]
        return FORMS[form]

    def weight_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """Return the size in memory, in bytes, of quantized weights with the given shapes.

        Weights that this policy does not quantize count as bfloat16.

        Args:
            shapes: shapes of the checkpoint's tensors by name.
        """
        total = 0.0
        for name, shape in shapes.items():
            count = 1
            for size in shape:
                count *= size
            form = self.form(name, shape[-1]) if len(shape) > 1 else None
            total += count * (16 if form is None else form.weight_bits) / 8
        return total

    def _at_edge(self, layer: int) -> bool:
        edge = -(-self._layers // _EDGE)
        return layer < edge or layer >= self._layers - edge


def automatic(shapes: Mapping[str, tuple[int, ...]], layers: int, file_bytes: int, free_bytes: int) -> str:
    """Return the quantization for `auto`: the most precise one whose weights take at most half of the free memory.

    The candidates are bf16 (no quantization), q8_0, q6k and q4k. If no candidate makes the weights small enough, the
    function returns `q4k`.

    Args:
        shapes: shapes of the checkpoint's tensors by name.
        layers: number of layers of the model.
        file_bytes: size of the tensors in the files, in bytes.
        free_bytes: free memory, in bytes.
    """
    budget = _MAX_MEMORY_SHARE * free_bytes
    if file_bytes <= budget:
        return _AUTOMATIC[0]
    fitting = (quant for quant in _AUTOMATIC if QuantPolicy(quant, layers).weight_bytes(shapes) <= budget)
    return next(fitting, _AUTOMATIC[-1])
