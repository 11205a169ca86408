"""Read the headers and the tensors of the safetensors files in a folder.

The files are untrusted input: names, offsets and sizes are checked against the file sizes before use.
"""

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from helexa.core.errors import UNREADABLE_FILE, ModelFileError, UnsupportedModelError
from helexa.neuron import tensors
from helexa.neuron.tensors import DType, Tensor
from helexa.neuron.weights.model_file import (
    MAX_JSON_BYTES,
    WHOLE,
    Part,
    TensorFile,
    open_model_file,
    parse_json,
    read_json,
)

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)

_MAX_DIMENSIONS = 8
_MAX_SIZE = 2**48
_AGAIN = "download the file again"

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class FileTensor:
    """Name, dtype, shape and position of a tensor in a safetensors file."""

    file: TensorFile
    name: str
    dtype_name: str  # name of the dtype in torch, such as `bfloat16`
    shape: tuple[int, ...]
    offset: int  # first byte of the tensor, from the start of the file
    nbytes: int

    @property
    def dtype(self) -> DType:
        """The dtype in the file."""
        return getattr(tensors, self.dtype_name)

    @property
    def column_block(self) -> int:
        """1, because each column can be read alone."""
        return 1

    def read(self, index: int | None = None, part: Part = WHOLE) -> Tensor:
        """Return the tensor, the slice `tensor[index]`, or a part, in the stored dtype.

        Raises:
            ModelFileError: the tensor has no slice at `index`, or the file cannot be read.
        """
        if index is not None:
            return self._slice(index).read(part=part)
        if self.nbytes == 0:
            return tensors.empty(part.shape(self.shape), dtype=self.dtype)
        rows, itemsize = (self.shape or (1,))[0], self.dtype.itemsize
        matrix = (rows, self.nbytes // rows // itemsize, itemsize)
        stored = self.file.read_part(self.offset, matrix, part, self.name)
        if self.offset % itemsize:  # `view` needs data that is aligned to the item size
            stored = stored.copy()
        return tensors.from_numpy(stored).view(self.dtype).view(part.shape(self.shape))

    def on_meta(self, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of `shape` and the stored dtype on torch's meta device."""
        return tensors.empty(shape, dtype=self.dtype, device="meta")

    def _slice(self, index: int) -> "FileTensor":
        if not self.shape or not 0 <= index < self.shape[0]:
            raise ModelFileError(
                f"{self.file.path.name}: tensor {self.name} of shape {list(self.shape)} has no part {index}"
            )
        size = self.nbytes // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * size, nbytes=size)


def file_tensors(folder: Path) -> dict[str, FileTensor]:
    """Return the tensors of the safetensors model in `folder`, by name.

    The model is `model.safetensors`, else the tensors that the index lists, else the only `.safetensors` file.

    Raises:
        ModelFileError: a file is missing or invalid.
    """
    if (folder / _SINGLE).exists():
        return _read_header(folder / _SINGLE)
    if (folder / _INDEX).exists():
        return _read_index(folder / _INDEX)
    files = sorted(folder.glob("*.safetensors"))
    # Several files without an index may belong to two models, or be incomplete.
    if len(files) != 1:
        raise ModelFileError(
            f"{folder}: the folder has {len(files)} .safetensors files and no {_INDEX}",
            advice="download the index, or the model again",
        )
    return _read_header(files[0])


def _read_index(path: Path) -> dict[str, FileTensor]:
    weight_map = read_json(path, MAX_JSON_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelFileError(f"{path.name}: weight_map is missing or does not name files")
    shards: dict[str, dict[str, FileTensor]] = {}
    found: dict[str, FileTensor] = {}
    for tensor, shard in weight_map.items():
        if shard not in shards:
            # Accept only plain file names, so that an index cannot refer to files outside the folder.
            if not _SHARD.fullmatch(shard):
                raise ModelFileError(
                    f"{path.name}: {shard!r} is not a plain name of a .safetensors file", advice=_AGAIN
                )
            shards[shard] = _read_header(path.parent / shard)
        if tensor not in shards[shard]:
            raise ModelFileError(
                f"{shard}: the file has no tensor {tensor!r}, but {path.name} says that the tensor is in this file",
                advice=_AGAIN,
            )
        found[tensor] = shards[shard][tensor]
    return found


def _read_header(path: Path) -> dict[str, FileTensor]:
    try:
        with open_model_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or 8 + length > size:
                raise ModelFileError(
                    f"{path.name}: the file is truncated in its header of {length} bytes", advice=_AGAIN
                )
            if length > MAX_JSON_BYTES:
                raise ModelFileError(f"{path.name}: the header is larger than {MAX_JSON_BYTES >> 20} MiB")
            header = parse_json(stream.read(length), path)
    except OSError as error:
        raise ModelFileError(
            f"{path.name}: cannot be read: {error.strerror or error}", advice=UNREADABLE_FILE
        ) from error
    header.pop("__metadata__", None)
    file = TensorFile(path, size)
    found = {name: _tensor(file, name, fields, 8 + length) for name, fields in header.items()}
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        # The format allows no gaps and no overlaps between tensors, and no bytes after the last tensor.
        if tensor.offset != end:
            raise ModelFileError(f"{path.name}: tensor {name} does not begin where the previous tensor ends")
        end += tensor.nbytes
    if end != size:
        problem = "the tensor data is truncated" if end > size else "bytes follow the last tensor"
        raise ModelFileError(f"{path.name}: {problem}: the file has {size} bytes, expected {end}", advice=_AGAIN)
    return found


def _tensor(file: TensorFile, name: str, fields: Any, data: int) -> FileTensor:
    if not name.isprintable():
        raise ModelFileError(f"{file.path.name}: tensor name {name!r} is not printable")
    if not isinstance(fields, dict):
        raise ModelFileError(f"{file.path.name}: the header entry of tensor {name} is not a JSON object")
    dtype_name = _DTYPES.get(str(fields.get("dtype")))
    if dtype_name is None:
        raise UnsupportedModelError(
            f"{file.path.name}: unsupported dtype {str(fields.get('dtype'))[:40]!r} in tensor {name}; "
            f"supported: {', '.join(_DTYPES)}"
        )
    shape, byte_range = fields.get("shape"), fields.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(byte_range) or len(byte_range) != 2 or byte_range[0] > byte_range[1]:
        raise ModelFileError(
            f"{file.path.name}: tensor {name} has an invalid shape, {str(shape)[:80]}, or invalid data_offsets, "
            f"{str(byte_range)[:80]}"
        )
    nbytes = math.prod(shape) * getattr(tensors, dtype_name).itemsize
    if nbytes != byte_range[1] - byte_range[0]:
        raise ModelFileError(
            f"{file.path.name}: tensor {name} of {nbytes} bytes has data_offsets "
            f"of {byte_range[1] - byte_range[0]} bytes"
        )
    return FileTensor(file, name, dtype_name, tuple(shape), data + byte_range[0], nbytes)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= _MAX_SIZE for size in value)
    )
