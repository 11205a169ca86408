"""Open the files of a model in any supported format as a checkpoint: named tensors and one configuration."""

from pathlib import Path
from typing import Any, Protocol, Self

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.formats import Weight
from helexa.neuron.weights.gguf.checkpoint import GgufCheckpoint
from helexa.neuron.weights.gguf.files import gguf_models
from helexa.neuron.weights.safetensors import SafetensorsCheckpoint


class Checkpoint(Protocol):
    """The weights and the configuration of a model's files.

    Weights are read one at a time, so that memory never holds both the file and the model.

    A multimodal checkpoint exposes only its text model: the nested text configuration, and the tensors of the text
    model under the names of a text-only model.

    Attributes:
        config: the text model's configuration, flat, with the keys of Hugging Face's `config.json`; its `model_type` is
            the name of a file in `models/`.
        total_bytes: total size of the tensors in the files, in bytes.
    """

    config: dict[str, Any]
    total_bytes: int

    def __enter__(self) -> Self:
        """Return the checkpoint; leaving the `with` block closes it."""
        ...

    def __exit__(self, *_: object) -> None: ...

    def names(self) -> list[str]:
        """Return tensor names in Hugging Face style (`model.layers.0.self_attn.q_proj.weight`)."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`.

        Raises:
            ModelFileError: the checkpoint has no tensor of this name.
        """
        ...

    def read(self, name: str, index: int | None = None) -> Weight:
        """Return tensor `name`, or the matrix at `index` of a stacked tensor.

        The caller may modify a plain tensor but must not keep it. Its memory may be a view of the file, and another
        process may truncate the file.

        Raises:
            ModelFileError: the checkpoint has no tensor of this name, or the file cannot be read.
        """
        ...

    def on_meta(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return a weight of `shape` on torch's meta device, in the format that `read` returns for tensor `name`.

        No weight is read. `shape` may differ from the tensor's shape, for example for one of several stacked matrices
        or for a transposed matrix.

        Raises:
            ModelFileError: the checkpoint has no tensor of this name, or its blocks do not divide `shape[-1]`.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`.

    Args:
        path: a GGUF file (the first file of a model in parts), a folder with `config.json` and `*.safetensors`, or a
            folder with one GGUF model.

    Raises:
        ModelFileError: `path` contains no model, or a model file is invalid.
    """
    if path.is_file():
        return GgufCheckpoint(path)
    if not path.is_dir():
        raise ModelFileError(f"{path}: no such file or folder")
    if any(path.glob("*.safetensors")):
        return SafetensorsCheckpoint(path)
    files = gguf_models(path)
    if len(files) == 1:
        return GgufCheckpoint(files[0])
    contents = f"{len(files)} .gguf files: name one of them" if files else "neither .safetensors nor .gguf files"
    raise ModelFileError(f"{path}: the folder holds {contents}")
