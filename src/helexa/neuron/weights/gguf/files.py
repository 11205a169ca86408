"""Read GGUF models: metadata, tensor table and the bytes of tensors.

This module does not import torch.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES
from helexa.neuron.weights.gguf.header_and_metadata_reader import (
    MAX_HEADER_BYTES,
    GgufHeader,
    GgufTensor,
    is_name,
    read_header,
)
from helexa.neuron.weights.model_file import WHOLE, Part, TensorFile

if TYPE_CHECKING:
    import numpy as np

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.DOTALL)
# Names of files that belong to another GGUF file: draft heads (MTP), and importance matrices of llama.cpp's tools.
_COMPANION = re.compile(r"(?:.*/)?(?:mtp/.*|mtp-[^/]*|(?:[^/]*[-_.])?imatrix\.gguf)", re.IGNORECASE | re.DOTALL)


class GgufFile:
    """A GGUF model, in one file or split into several files, with validated headers."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.path = path  # the GGUF file. Of a split model, the first file.
        self.version = header.version
        # Metadata by key: numbers, booleans, strings and lists. Of a split model, the metadata of the first file.
        self.metadata = header.metadata
        # type, shape and position of the tensors of all files, by name and in file order
        self.tensors: dict[str, GgufTensor] = {}
        self._files: dict[str, TensorFile] = {}
        self._add(path, header)

    @classmethod
    def open(cls, path: Path, max_header_bytes: int = MAX_HEADER_BYTES) -> "GgufFile":
        """Read and validate the headers of the GGUF model whose first file is `path`.

        Raises:
            ModelFileError: a file cannot be read or is not a valid GGUF file, or the files do not belong to one model.
        """
        opened = cls(path, read_header(path, max_header_bytes))
        count = opened._number("split.count", 1)
        if count > 1:
            opened._add_parts(count, max_header_bytes)
        return opened

    @property
    def architecture(self) -> str:
        """The value of `general.architecture`.

        Raises:
            ModelFileError: the file has no valid `general.architecture`.
        """
        architecture = self.metadata.get("general.architecture")
        if not is_name(architecture):
            raise ModelFileError(f"{self.path.name}: general.architecture is missing or not a name")
        return architecture

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> "np.ndarray":
        """Return the stored bytes of tensor `name`, or of one matrix of a stack (`index`).

        Args:
            part: the rows and columns to read. A column stands for a quantization block, or for a number of a type that
                is not quantized.

        Returns:
            A uint8 array, in most cases a memory mapping of the file (see `TensorFile.read_part`).

        Raises:
            ModelFileError: the tensor or matrix does not exist, or the file cannot be read.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self.path.name}: the file has no tensor {name}")
        offset, nbytes, shape = tensor.offset, tensor.nbytes, tensor.shape
        if index is not None:
            if len(shape) < 3 or not 0 <= index < shape[0]:
                raise ModelFileError(f"{self.path.name}: tensor {name} has no matrix {index}")
            nbytes //= shape[0]
            offset += index * nbytes
            shape = shape[1:]
        block_bytes = BLOCK_SIZES[tensor.type][1]
        matrix = (shape[0], nbytes // shape[0] // block_bytes, block_bytes)
        return self._files[name].read_part(offset, matrix, part, name)

    def close(self) -> None:
        """Close the files. The metadata and the tensor table stay available."""
        for file in self._files.values():
            file.close()

    def _add_parts(self, count: int, max_header_bytes: int) -> None:
        match = _PART.fullmatch(self.path.name)
        if match is None or int(match["count"]) != count:
            raise ModelFileError(
                f"{self.path.name}: the file is one of {count} parts, so its name must end in -of-{count:05}.gguf",
                advice="rename the file",
            )
        names = part_names(self.path.name)
        if self.path.name != names[0]:
            raise ModelFileError(
                f"{self.path.name}: the file is part {int(match['number'])} of {count}, not the first part",
                advice=f"open {names[0]}",
            )
        for number, name in enumerate(names[1:], start=1):
            path = self.path.with_name(name)
            if not path.exists():
                raise ModelFileError(
                    f"{name}: the file is missing; it is part {number + 1} of {count} of the model",
                    advice="download the file",
                )
            header = read_header(path, max_header_bytes)
            if (header.metadata.get("split.no"), header.metadata.get("split.count")) != (number, count):
                raise ModelFileError(f"{name}: its header does not say that it is part {number + 1} of {count}")
            self._add(path, header)
        total = self._number("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise ModelFileError(
                f"{self.path.name}: the parts hold {len(self.tensors)} tensors, expected {total}",
                advice="download them again",
            )

    def _add(self, path: Path, header: GgufHeader) -> None:
        file = TensorFile(path, header.size)
        for name, tensor in header.tensors.items():
            if name in self.tensors:
                raise ModelFileError(f"{path.name}: tensor {name} is in an earlier part as well")
            self.tensors[name], self._files[name] = tensor, file

    def _number(self, key: str, default: int) -> int:
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise ModelFileError(f"{self.path.name}: key {key} is {repr(value)[:40]}, expected a whole number")
        return value


def part_names(name: str) -> list[str]:
    """Return the names of all files of the GGUF model that has the file `name`."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1)]


def is_mmproj(name: str) -> bool:
    """Return whether a file name is that of an image or audio encoder (`mmproj`)."""
    return "mmproj" in name.lower()  # such as `mmproj-F16.gguf` or `Qwen2.5-VL-7B.mmproj-Q8_0.gguf`


def is_companion(name: str) -> bool:
    """Return whether a GGUF file belongs to another file, and is not itself a model.

    `name` may be a path. Publishers put draft heads in a folder `MTP`.
    """
    return is_mmproj(name.rpartition("/")[2]) or _COMPANION.fullmatch(name) is not None


def gguf_models(folder: Path) -> list[Path]:
    """Return the GGUF models in `folder` (their first files), sorted by name."""
    models: dict[str, Path] = {}
    for path in sorted(folder.glob("*.gguf")):
        match = _PART.fullmatch(path.name)
        if not is_companion(path.name):
            models.setdefault(match["stem"] + match["count"] if match else path.name, path)
    return list(models.values())
