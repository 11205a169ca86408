"""Choose the load-time quantization of the matrices of a vision tower."""

import re

from helexa.neuron.weights.quantization.quant_form import FORMS, QuantForm
from helexa.neuron.weights.quantization.quant_policy import QuantPolicy

_FORM = "q8_0"
_MATRIX = re.compile(
    r"(?:blocks|encoder\.layers)\.\d+\."
    r"(?:attn\.(?:qkv|q|k|v|proj)|self_attn\.(?:[qkv]|out)_proj|mlp\.\w+)\.weight",
    re.ASCII,
)


class VisionQuantPolicy(QuantPolicy):
    """Chooses q8_0 for the matrices of the encoder layers if the text model is quantized at load.

    Other matrices stay unquantized: the patch embedding, the position embeddings and the projection to the text model.
    They have few weights, and every image passes through them. No format has fewer than 8 bits, because the tower is
    small compared with the text model, and its errors change the input of the text model.

    Args:
        quant: quantization of the text model (see `QuantPolicy`). An empty string means no quantization.
    """

    def __init__(self, quant: str) -> None:
        super().__init__(quant, layers=0)

    def form(self, name: str, columns: int) -> QuantForm | None:
        """Return the format for the matrix `name`, or None if the matrix is not quantized.

        Args:
            name: tensor name in the checkpoint of the vision part.
            columns: number of columns of the matrix, with padding.
        """
        form = FORMS[_FORM]
        return form if self.quant and _MATRIX.fullmatch(name) and form.fits(columns) else None
