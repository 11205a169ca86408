"""Read the headers of the safetensors files in a folder, and the tensors that the headers describe.

The files are untrusted input: names, offsets and sizes are checked against the file sizes before use.
"""

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.json_object import MAX_JSON_BYTES, parse_json, read_json
from helexa.neuron.weights.part import WHOLE, Part
from helexa.neuron.weights.tensor_file import TensorFile

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)

_MAX_DIMENSIONS = 8
_MAX_SIZE = 2**48

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class FileTensor:
    """Name, dtype, shape and position of a tensor in a safetensors file.

    Attributes:
        offset: first byte of the tensor, from the start of the file.
    """

    file: TensorFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def column_block(self) -> int:
        """1, because each column can be read alone."""
        return 1

    def read(self, index: int | None = None, part: Part = WHOLE) -> Tensor:
        """Return the tensor, or a part of it, in the stored dtype. With `index`, read only the slice `tensor[index]`.

        Raises:
            ModelFileError: the tensor has no slice at `index`, or the file cannot be read.
        """
        if index is not None:
            return self._slice(index).read(part=part)
        if self.nbytes == 0:
            return torch.empty(part.shape(self.shape), dtype=self.dtype)
        rows, itemsize = (self.shape or (1,))[0], self.dtype.itemsize
        matrix = (rows, self.nbytes // rows // itemsize, itemsize)
        stored = self.file.read_part(self.offset, matrix, part, self.name)
        if self.offset % itemsize:  # the tensor is not aligned to its item size
            stored = stored.copy()
        return torch.from_numpy(stored).view(self.dtype).view(part.shape(self.shape))

    def on_meta(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of `shape` and the stored dtype on torch's meta device."""
        return torch.empty(shape, dtype=self.dtype, device="meta")

    def _slice(self, index: int) -> "FileTensor":
        if not self.shape or not 0 <= index < self.shape[0]:
            raise ModelFileError(f"{self.file.path.name}: tensor {self.name} of {list(self.shape)} has no part {index}")
        size = self.nbytes // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * size, nbytes=size)


def file_tensors(folder: Path) -> dict[str, FileTensor]:
    """Return the tensors of all safetensors files in `folder`, by name.

    The folder contains either one `.safetensors` file, or several files and an index.

    Raises:
        ModelFileError: a file is missing or invalid.
    """
    if (folder / _SINGLE).exists():
        return _read_header(folder / _SINGLE)
    if (folder / _INDEX).exists():
        return _read_index(folder / _INDEX)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelFileError(f"{folder}: {len(files)} .safetensors files and no {_INDEX}")
    return _read_header(files[0])


def _read_index(path: Path) -> dict[str, FileTensor]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelFileError(f"{path.name}: weight_map is missing or does not name files")
    shards: dict[str, dict[str, FileTensor]] = {}
    tensors: dict[str, FileTensor] = {}
    for tensor, shard in weight_map.items():
        if shard not in shards:
            # Accept only plain file names, so that an index cannot refer to files outside the folder.
            if not _SHARD.fullmatch(shard):
                raise ModelFileError(f"{path.name}: {shard!r} is not a .safetensors file of this folder")
            shards[shard] = _read_header(path.parent / shard)
        if tensor not in shards[shard]:
            raise ModelFileError(f"{shard}: no tensor {tensor!r}, which {path.name} places there")
        tensors[tensor] = shards[shard][tensor]
    return tensors


def _read_header(path: Path) -> dict[str, FileTensor]:
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or 8 + length > size:
                raise ModelFileError(f"{path.name}: truncated: its header ends beyond the end of the file")
            if length > MAX_JSON_BYTES:
                raise ModelFileError(f"{path.name}: the header is larger than {MAX_JSON_BYTES >> 20} MiB")
            header = parse_json(stream.read(length), path)
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from error
    header.pop("__metadata__", None)
    file = TensorFile(path, size)
    tensors = {name: _tensor(file, name, fields, 8 + length) for name, fields in header.items()}
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise ModelFileError(f"{path.name}: tensor {name} does not begin where the previous tensor ends")
        end += tensor.nbytes
    if end != size:
        problem = "truncated in tensor data" if end > size else "bytes follow the last tensor"
        raise ModelFileError(f"{path.name}: {problem}")
    return tensors


def _tensor(file: TensorFile, name: str, fields: Any, data: int) -> FileTensor:
    if not name.isprintable():
        raise ModelFileError(f"{file.path.name}: tensor name {name!r} is not printable")
    if not isinstance(fields, dict):
        raise ModelFileError(f"{file.path.name}: tensor {name} is not described by an object")
    dtype = _DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        raise ModelFileError(f"{file.path.name}: unsupported dtype {str(fields.get('dtype'))[:40]!r} in tensor {name}")
    shape, byte_range = fields.get("shape"), fields.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(byte_range) or len(byte_range) != 2 or byte_range[0] > byte_range[1]:
        raise ModelFileError(f"{file.path.name}: tensor {name} has invalid shape or data_offsets")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != byte_range[1] - byte_range[0]:
        raise ModelFileError(
            f"{file.path.name}: tensor {name} of {nbytes} bytes has data_offsets "
            f"of {byte_range[1] - byte_range[0]} bytes"
        )
    return FileTensor(file, name, dtype, tuple(shape), data + byte_range[0], nbytes)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= _MAX_SIZE for size in value)
    )
