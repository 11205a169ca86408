"""Reading a folder of safetensors files and their `config.json`.

Nothing in the files is trusted: names, offsets and sizes are checked against the real files before they are used.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.tensor_file import TensorFile

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)

# Far above any real file's header, and low enough that a hostile one cannot exhaust memory.
_MAX_JSON_BYTES = 32 << 20
_MAX_DIMENSIONS = 8
_MAX_SIZE = 2**48

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class _Entry:
    file: TensorFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int

    def part(self, index: int) -> "_Entry":
        size = self.nbytes // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * size, nbytes=size)


class SafetensorsCheckpoint:
    """The weights in a folder's safetensors files; see `Checkpoint`."""

    def __init__(self, folder: Path) -> None:
        """Open the folder: `config.json`, and one `.safetensors` file or several with an index.

        Raises:
            ModelFileError: when a file is missing or not sound.
        """
        self._folder = folder
        self.config: dict[str, Any] = _read_json(folder / _CONFIG)
        self._entries = _entries(folder)
        self.total_bytes = sum(entry.nbytes for entry in self._entries.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def names(self) -> list[str]:
        """Tensor names, in the order of the files."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`."""
        return self._find(name).shape

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Tensor `name`, or the matrix at `index` of it, in the type it is stored in."""
        entry = self._find(name) if index is None else self._find(name).part(index)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        stored = torch.from_numpy(entry.file.read(entry.offset, entry.nbytes, name))
        return stored.view(entry.dtype).view(entry.shape)

    def close(self) -> None:
        """Close the files."""
        for entry in self._entries.values():
            entry.file.close()

    def _find(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelFileError(f"{self._folder}: no tensor {name}")
        return entry


def _entries(folder: Path) -> dict[str, _Entry]:
    if (folder / _SINGLE).exists():
        return _read_header(folder / _SINGLE)
    if (folder / _INDEX).exists():
        return _read_index(folder / _INDEX)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ModelFileError(f"{folder}: {len(files)} .safetensors files and no {_INDEX}")
    return _read_header(files[0])


def _read_index(path: Path) -> dict[str, _Entry]:
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelFileError(f"{path.name}: weight_map is missing or does not name files")
    shards: dict[str, dict[str, _Entry]] = {}
    entries: dict[str, _Entry] = {}
    for tensor, shard in weight_map.items():
        if shard not in shards:
            # A name of the folder's own, so that an index cannot reach for other files.
            if not _SHARD.fullmatch(shard):
                raise ModelFileError(f"{path.name}: {shard!r} is not a .safetensors file of this folder")
            shards[shard] = _read_header(path.parent / shard)
        if tensor not in shards[shard]:
            raise ModelFileError(f"{shard}: no tensor {tensor!r}, which {path.name} places there")
        entries[tensor] = shards[shard][tensor]
    return entries


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or 8 + length > size:
                raise ModelFileError(f"{path.name}: truncated: its header ends beyond the end of the file")
            if length > _MAX_JSON_BYTES:
                raise ModelFileError(f"{path.name}: the header is larger than {_MAX_JSON_BYTES >> 20} MiB")
            header = _parse_json(stream.read(length), path)
    except OSError as error:
        raise _unreadable(path, error) from error
    header.pop("__metadata__", None)
    file = TensorFile(path, size)
    entries = {name: _entry(file, name, fields, 8 + length) for name, fields in header.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            raise ModelFileError(f"{path.name}: tensor {name} does not begin where the one before it ends")
        end += entry.nbytes
    if end != size:
        problem = "truncated in tensor data" if end > size else "bytes follow the last tensor"
        raise ModelFileError(f"{path.name}: {problem}")
    return entries


def _entry(file: TensorFile, name: str, fields: Any, data: int) -> _Entry:
    if not name.isprintable():
        raise ModelFileError(f"{file.path.name}: tensor name {name!r} is not printable")
    if not isinstance(fields, dict):
        raise ModelFileError(f"{file.path.name}: tensor {name} is not described by an object")
    dtype = _DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        raise ModelFileError(f"{file.path.name}: unsupported dtype {str(fields.get('dtype'))[:40]!r} in tensor {name}")
    shape, span = fields.get("shape"), fields.get("data_offsets")
    if not _sizes(shape) or not _sizes(span) or len(span) != 2 or span[0] > span[1]:
        raise ModelFileError(f"{file.path.name}: tensor {name} has no sound shape and data_offsets")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != span[1] - span[0]:
        raise ModelFileError(
            f"{file.path.name}: tensor {name} of {nbytes} bytes has a place of {span[1] - span[0]} bytes"
        )
    return _Entry(file, dtype, tuple(shape), data + span[0], nbytes)


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size <= _MAX_SIZE for size in value)
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > _MAX_JSON_BYTES:
                raise ModelFileError(f"{path.name}: larger than {_MAX_JSON_BYTES >> 20} MiB")
            return _parse_json(stream.read(size), path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _parse_json(text: bytes, path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelFileError(f"{path.name}: not a JSON object")
    return parsed


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("a key appears twice")
    return parsed


def _unreadable(path: Path, error: OSError) -> ModelFileError:
    return ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}")
