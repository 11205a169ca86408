"""Open a folder with safetensors files and a `config.json` as a checkpoint."""

import logging
from pathlib import Path
from typing import Any, Self

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.block_formats import StoredTensor, stored_tensors
from helexa.neuron.weights.formats import Weight
from helexa.neuron.weights.json_object import read_json
from helexa.neuron.weights.part import WHOLE, Part
from helexa.neuron.weights.safetensors_file import file_tensors
from helexa.neuron.weights.text_part import summarize_names, text_config, text_tensor_names

_log = logging.getLogger("helexa.neuron.weights")
_CONFIG = "config.json"


class SafetensorsCheckpoint:
    """The `Checkpoint` of a folder with safetensors files and a `config.json`."""

    def __init__(self, folder: Path) -> None:
        """Read `config.json` and the headers of the `.safetensors` files in `folder`.

        The folder contains either one `.safetensors` file, or several files and an index
        (`model.safetensors.index.json`).

        Raises:
            ModelFileError: a file is missing or invalid, or the quantization of the checkpoint is not supported.
        """
        self._folder = folder
        self.config: dict[str, Any] = text_config(read_json(folder / _CONFIG))
        tensors = file_tensors(folder)
        self._files = {tensor.file.path: tensor.file for tensor in tensors.values()}
        self._stored_names = names = text_tensor_names(tensors)
        skipped = tensors.keys() - names.values()
        if skipped:
            _log.info("%s: skipped tensors outside the text model: %s", folder.name, summarize_names(skipped))
        text = {name: tensors[stored] for name, stored in names.items()}
        self._tensors: dict[str, StoredTensor] = stored_tensors(text, self.config)
        self.total_bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Return the names of the text model's tensors, in file order."""
        return list(self._tensors)

    def stored_name(self, name: str) -> str:
        """Return the name of tensor `name` in the files."""
        return self._stored_names.get(name, name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of tensor `name`."""
        return self._find(name).shape

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> Weight:
        """Return tensor `name`, or a part of it. With `index`, read one matrix of a tensor that is a stack of matrices.

        fp8 tensors are dequantized to float32, MXFP4 tensors stay quantized, and other tensors keep the stored dtype.
        """
        return self._find(name).read(index, part)

    def on_meta(self, name: str, shape: tuple[int, ...]) -> Weight:
        """Return a weight of `shape` on torch's meta device, in the format that `read` returns for tensor `name`."""
        return self._find(name).on_meta(shape)

    def column_block(self, name: str) -> int:
        """Return the number of adjacent columns of tensor `name` that must be read together."""
        return self._find(name).column_block

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _find(self, name: str) -> StoredTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self._folder}: no tensor {name}")
        return tensor
