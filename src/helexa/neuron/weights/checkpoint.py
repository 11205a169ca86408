"""Open a model's files, in any supported format, as a `Checkpoint`."""

from pathlib import Path
from typing import Any, Protocol, Self

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.gguf.checkpoint import GgufCheckpoint
from helexa.neuron.weights.gguf.files import gguf_models
from helexa.neuron.weights.model_file import WHOLE, Part
from helexa.neuron.weights.quantized_matrix import Weight
from helexa.neuron.weights.safetensors_checkpoint import SafetensorsCheckpoint


class Checkpoint(Protocol):
    """The weights and the configuration of a model's files.

    Weights are read one at a time, so memory never holds both all weights of the files and the loaded model. If the
    model is multimodal, the checkpoint exposes only the text model, with the tensor names of a text-only model.
    """

    # The text model's configuration, with the keys of Hugging Face's `config.json`. The keys of a nested `text_config`
    # are moved to the top level. `model_type` selects the model's class in `helexa.neuron.models`.
    config: dict[str, Any]
    total_bytes: int  # total size of the tensors in the files, in bytes

    def __enter__(self) -> Self:
        """Return the checkpoint itself. Leaving the `with` block closes the files."""
        ...

    def __exit__(self, *_: object) -> None: ...

    def names(self) -> list[str]:
        """Return all tensor names, such as `model.layers.0.self_attn.q_proj.weight`.

        Tensors without a Hugging Face name keep their names in the files. No layer reads such tensors, so loading the
        model reports them. Tensors of other modalities and of multi-token prediction are not returned.
        """
        ...

    def stored_name(self, name: str) -> str:
        """Return the name of tensor `name` in the files."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`.

        Raises:
            ModelFileError: the checkpoint has no tensor of this name.
        """
        ...

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> Weight:
        """Return tensor `name`, one matrix of a stack (`index`), or a part of it.

        The caller may modify an unquantized tensor. To keep a tensor after the load, the caller must copy it, because
        its memory may be a mapping of the file, which becomes invalid if another process truncates the file.

        Args:
            index: index of one matrix in a stack of matrices; None for the whole tensor.
            part: rows and columns to read. The columns must be whole blocks (see `column_block`).

        Raises:
            ModelFileError: the checkpoint has no tensor of this name, or the file cannot be read.
        """
        ...

    def on_meta(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return a weight of `shape` on the meta device, in the format of `read(name)`.

        `shape` may differ from the shape in the file, for example if the caller needs a single matrix of a stack.

        Raises:
            ModelFileError: the checkpoint has no tensor of this name, or `shape[-1]` is not a multiple of the tensor's
                quantization block size.
        """
        ...

    def column_block(self, name: str) -> int:
        """Return how many adjacent columns of tensor `name` must be read together."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`, which the caller must close.

    Args:
        path: a GGUF file (the first file of a split model), a folder with `config.json` and `*.safetensors`, or a
            folder with one GGUF model.

    Raises:
        ModelFileError: `path` does not exist, contains no model or several GGUF models, or a model file is invalid.
    """
    if path.is_file():
        return GgufCheckpoint(path)
    if not path.is_dir():
        raise ModelFileError(f"{path}: no such file or folder", advice="check the path of the model")
    if any(path.glob("*.safetensors")):
        return SafetensorsCheckpoint(path)
    files = gguf_models(path)
    if len(files) == 1:
        return GgufCheckpoint(files[0])
    if files:
        raise ModelFileError(
            f"{path}: the folder holds {len(files)} .gguf files", advice="give the path of one of them"
        )
    raise ModelFileError(f"{path}: the folder holds neither .safetensors nor .gguf files")


def require_floats(name: str, weight: Weight) -> None:
    """Raise a ModelFileError if a tensor has integers, which cannot be weights."""
    # Without this check, the integer codes of a quantization that the configuration does not state would be used as
    # weights.
    if isinstance(weight, Tensor) and "float" not in tensors.dtype_name(weight.dtype):
        raise ModelFileError(
            f"tensor {name} has the dtype {tensors.dtype_name(weight.dtype)}, expected floating-point numbers; if the "
            "model is quantized, its configuration must state the quantization"
        )
