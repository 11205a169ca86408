"""Read the header of a GGUF file (version 2 or 3), which contains the metadata and the tensor table.

This module does not import torch. The file is untrusted input: each size, count and offset is checked against the file
size before use.
"""

import math
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeGuard

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES, GgmlType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

# Larger than any real header, and small enough that a malicious file cannot exhaust memory.
_MAX_HEADER_BYTES = 128 << 20
_MAX_ARRAY_ELEMENTS = 4 << 20
_MAX_ARRAYS = 1 << 15
_MAX_TENSORS = 1 << 16
_MAX_KEYS = 1 << 14
_MAX_NAME_BYTES = 1024
_MAX_ARRAY_DEPTH = 4
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 16

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """Type, shape and position of one tensor, from the tensor table of a GGUF file.

    Attributes:
        name: the tensor's name in the file.
        type: ggml type of the elements.
        shape: dimensions in torch's order, slowest first. A linear layer with K inputs and N outputs has [N, K].
        offset: first byte of the tensor, from the start of the file.
        nbytes: number of bytes of the tensor in the file.
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """The validated header of a GGUF file.

    Attributes:
        size: size of the file, in bytes.
        version: GGUF version, 2 or 3.
        metadata: metadata by key: numbers, booleans, strings and lists.
        tensors: the entries of the tensor table by tensor name, in file order.
    """

    size: int
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """Return the header of the file at `path`.

    Raises:
        ModelFileError: the file cannot be read or is not a valid GGUF file.
    """
    try:
        with path.open("rb", buffering=1 << 18) as file:
            size = os.fstat(file.fileno()).st_size
            return _HeaderReader(file, path, size).parse()
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from error


def is_name(value: Any) -> TypeGuard[str]:
    """Return whether a metadata value is a printable, short string, so that an error message can contain it."""
    return isinstance(value, str) and len(value) <= _MAX_NAME_BYTES and value.isprintable()


class _HeaderReader:
    """Parser for the header of one GGUF file. It reads the file once, from the beginning."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file = file
        self._path = path
        self._size = size
        self._position = 0
        self._elements_left = _MAX_ARRAY_ELEMENTS
        self._arrays_left = _MAX_ARRAYS
        self._where = "header"

    def parse(self) -> GgufHeader:
        if self._read_bytes(4) != _MAGIC:
            self._fail("not a GGUF file")
        version = self._integer("<I")
        if version not in _VERSIONS:
            self._fail(f"GGUF version {version} (or byte order) is not supported")
        tensor_count = self._integer("<Q")
        key_count = self._integer("<Q")
        for kind, count, limit in (("tensors", tensor_count, _MAX_TENSORS), ("keys", key_count, _MAX_KEYS)):
            if count > limit:
                self._fail(f"the header claims {count} {kind}")
        metadata = self._metadata(key_count)
        tensors = self._table(tensor_count, self._alignment(metadata))
        return GgufHeader(self._size, version, metadata, tensors)

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            self._where = f"metadata key {index}"
            key = self._name()
            self._where = f"key {key}"
            if key in metadata:
                self._fail("appears twice")
            metadata[key] = self._value(self._integer("<I"), depth=0)
        return metadata

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self._where = "key general.alignment"
            self._fail("is not a power of two from 8 to 65536")
        return alignment

    def _table(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        rows: list[tuple[str, GgmlType, tuple[int, ...], int, int]] = []
        for index in range(count):
            self._where = f"tensor {index}"
            name = self._name()
            self._where = f"tensor {name}"
            rows.append((name, *self._row(name, alignment)))
        data = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset, nbytes in rows:
            self._where = f"tensor {name}"
            if name in tensors:
                self._fail("appears twice")
            if data + offset + nbytes > self._size:
                self._fail("truncated: its data ends beyond the end of the file")
            tensors[name] = GgufTensor(name, kind, shape, data + offset, nbytes)
        # Reject overlapping tensors, with which a small file could describe a large model.
        for previous, following in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
            if previous.offset + previous.nbytes > following.offset:
                self._where = f"tensor {following.name}"
                self._fail(f"shares bytes with tensor {previous.name}")
        return tensors

    def _row(self, name: str, alignment: int) -> tuple[GgmlType, tuple[int, ...], int, int]:
        dimensions = self._integer("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._fail(f"has {dimensions} dimensions")
        shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", self._read_bytes(8 * dimensions))))
        type_id = self._integer("<I")
        offset = self._integer("<Q")
        if type_id not in GgmlType.__members__.values():
            self._fail(f"unknown tensor type {type_id}")
        kind = GgmlType(type_id)
        if kind not in BLOCK_SIZES:
            self._fail(f"unsupported tensor type {kind.name}")
        elements, block_bytes = BLOCK_SIZES[kind]
        if 0 in shape:
            self._fail("has an empty dimension")
        if shape[-1] % elements:
            self._fail(f"rows of {shape[-1]} elements are not whole {kind.name} blocks of {elements}")
        if offset % alignment:
            self._fail(f"offset {offset} is not aligned to {alignment}")
        # Python integers do not overflow, so an oversized product fails the check against the file size.
        return kind, shape, offset, math.prod(shape) // elements * block_bytes

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind == _ARRAY:
            return self._array(depth + 1)
        return self._numbers(kind, 1)[0]

    def _array(self, depth: int) -> list[Any]:
        if depth > _MAX_ARRAY_DEPTH:
            self._fail("arrays are nested too deep")
        kind = self._integer("<I")
        count = self._integer("<Q")
        if count > self._elements_left:
            self._fail(f"an array of {count} elements is too long")
        self._elements_left -= count
        if kind == _ARRAY:
            self._arrays_left -= count
            if self._arrays_left < 0:
                self._fail(f"an array of {count} arrays is too long")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        code = _SCALARS.get(kind)
        if code is None:
            self._fail(f"unknown value type {kind}")
        return list(struct.unpack(f"<{count}{code}", self._read_bytes(count * struct.calcsize(f"<{code}"))))

    def _strings(self, count: int) -> list[str]:
        # An inlined loop, since a vocabulary has several hundred thousand entries.
        read, unpack = self._file.read, struct.Struct("<Q").unpack
        position, limit = self._position, min(self._size, _MAX_HEADER_BYTES)
        strings: list[str] = []
        try:
            for _ in range(count):
                (length,) = unpack(read(8))
                position += 8 + length
                if position > limit:
                    self._beyond(position)
                strings.append(read(length).decode())
        except struct.error:
            self._fail("truncated")
        except UnicodeDecodeError:
            self._fail("is not valid UTF-8")
        self._position = position
        return strings

    def _name(self) -> str:
        length = self._integer("<Q")
        if length > _MAX_NAME_BYTES:
            self._fail(f"its name is {length} bytes long")
        try:
            name = self._read_bytes(length).decode()
        except UnicodeDecodeError:
            self._fail("its name is not valid UTF-8")
        if not name or not name.isprintable():
            self._fail("its name is empty or not printable")
        return name

    def _integer(self, layout: str) -> int:
        return struct.unpack(layout, self._read_bytes(struct.calcsize(layout)))[0]

    def _read_bytes(self, nbytes: int) -> bytes:
        end = self._position + nbytes
        if end > min(self._size, _MAX_HEADER_BYTES):
            self._beyond(end)
        content = self._file.read(nbytes)
        if len(content) != nbytes:
            self._fail("truncated")
        self._position = end
        return content

    def _beyond(self, end: int) -> NoReturn:
        self._fail("truncated" if end > self._size else f"the header is larger than {_MAX_HEADER_BYTES >> 20} MiB")

    def _fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self._path.name}: {self._where}: {problem}")
