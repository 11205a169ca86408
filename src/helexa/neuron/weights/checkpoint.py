"""A model's files, whatever their format, as named tensors and one configuration."""

from pathlib import Path
from typing import Any, Protocol, Self

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.formats import Weight
from helexa.neuron.weights.gguf.checkpoint import GgufCheckpoint
from helexa.neuron.weights.gguf.files import gguf_models
from helexa.neuron.weights.safetensors import SafetensorsCheckpoint


class Checkpoint(Protocol):
    """Weights that are read one at a time, so that a load never holds the file and the model at once.

    A multimodal checkpoint shows its text part only: the configuration nested in it, and the text model's tensors under
    the names that they have in a model of text alone.

    Attributes:
        config: the text model's configuration, flat, in the terms of Hugging Face's `config.json`; its `model_type` is
            the name of a file in `models/`.
        total_bytes: bytes that all tensors take in the files.
    """

    config: dict[str, Any]
    total_bytes: int

    def __enter__(self) -> Self:
        """The checkpoint itself; it closes at the end of the block."""
        ...

    def __exit__(self, *_: object) -> None: ...

    def names(self) -> list[str]:
        """Tensor names, as Hugging Face's checkpoints have them (`model.layers.0.self_attn.q_proj.weight`)."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`.

        Raises:
            ModelFileError: when there is no such tensor.
        """
        ...

    def read(self, name: str, index: int | None = None) -> Weight:
        """Tensor `name`, or of a tensor of several matrices the one at `index`.

        A plain tensor may be changed, but is not for keeping: its memory may be a view of the file, which somebody may
        cut short.

        Raises:
            ModelFileError: when there is no such tensor or its file cannot be read.
        """
        ...

    def on_meta(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return a weight of `shape` in the format that tensor `name` has when it is read, on torch's meta device.

        No weight is read. `shape` may differ from the tensor's: a matrix of several, or a transposed one.

        Raises:
            ModelFileError: there is no such tensor, or its blocks do not divide `shape[-1]`.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`.

    Args:
        path: a GGUF file (of one in parts the first), a folder with `config.json` and `*.safetensors`, or a folder
            with one GGUF model.

    Raises:
        ModelFileError: when there is nothing to load at `path`, or a file in it is not sound.
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
    found = f"{len(files)} .gguf files: name one of them" if files else "neither .safetensors nor .gguf files"
    raise ModelFileError(f"{path}: the folder holds {found}")
