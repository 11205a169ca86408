"""What load-time quantisation does to which tensor; docs/quantization.md says why."""

import re
from collections.abc import Mapping

from helexa.neuron.weights.quantization.quant_form import FORMS, PLAIN, QuantForm

# Matrices that many weights are in. Whatever is not among them stays as it is: norms, biases, routers, gates of whole
# layers, convolutions, decays, sinks.
_MATRIX = re.compile(
    r"(?:model\.layers\.(?P<layer>\d+)\.)?(?:[\w.]+\.)?"
    r"(?P<part>\w+_proj|in_proj_(?:qkv|qkvz|z)|embed_tokens|lm_head)(?:\.weight)?(?:#\d+)?",
    re.ASCII,
)
_SENSITIVE = ("down_proj", "v_proj")  # in the first and last layers
_WORDS = ("embed_tokens", "lm_head")
_EDGE = 8  # the part of all layers that are first, or last

_BETTER = {"q4_0": "q6k", "q4_1": "q6k", "q4k": "q6k", "q5_0": "q6k", "q5_1": "q6k", "q5k": "q6k", "q6k": "q8_0"}
_BY_GROUPS = {"q4k": "q4_1", "q5k": "q5_1", "q6k": "q8_0"}  # where rows do not divide into stretches

_AUTOMATIC = ("bf16", "q8_0", "q6k", "q4k")
_COMFORTABLE = 0.5  # of the memory that is free


class QuantPolicy:
    """Chooses a form for each matrix of one model.

    Args:
        quant: one of `NAMES` but `auto`, or empty for nothing quantised.
        layers: how many the model has.
    """

    def __init__(self, quant: str, layers: int) -> None:
        self.quant = "" if quant in PLAIN else quant
        self._layers = layers

    def form(self, name: str, columns: int) -> QuantForm | None:
        """The form of the matrix `name` with rows of so many columns; None leaves it as it is.

        Args:
            name: as checkpoints have it; `#7` behind it tells one expert's matrix.
        """
        match = _MATRIX.fullmatch(name) if self.quant else None
        if match is None:
            return None
        form = self.quant
        if match["part"] in _WORDS:
            form = form if FORMS[form].bits > FORMS["q6k"].bits else "q6k"
        elif match["part"] in _SENSITIVE and self._at_edge(int(match["layer"] or 0)):
            form = _BETTER.get(form, form)
        while not FORMS[form].fits(columns):
            if form not in _BY_GROUPS:
                return None
            form = _BY_GROUPS[form]
        return FORMS[form]

    def weight_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> float:
        """What the weights of a checkpoint take in memory, those that are not quantised as bfloat16."""
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
    """What `auto` is for a model: as much as goes well into the memory that is free, and `q4k` where nothing does.

    Args:
        shapes: of the checkpoint's tensors.
        file_bytes: what they take as they are stored.
    """
    room = _COMFORTABLE * free_bytes
    if file_bytes <= room:
        return _AUTOMATIC[0]
    fitting = (quant for quant in _AUTOMATIC if QuantPolicy(quant, layers).weight_bytes(shapes) <= room)
    return next(fitting, _AUTOMATIC[-1])
