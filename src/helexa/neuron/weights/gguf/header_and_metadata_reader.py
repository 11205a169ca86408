"""Read the header of a GGUF file: the metadata and the tensor table.

This module does not import torch. The file is untrusted input: each size, count and offset is checked against the file
size before use.
"""

import math
import os
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeGuard, TypeVar, overload

from helexa.core.errors import UNREADABLE_FILE, ModelFileError
from helexa.neuron.weights.gguf.ggml_type import BLOCK_SIZES, GgmlType
from helexa.neuron.weights.model_file import open_model_file

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# From the GGUF specification: the alignment of tensor data in files without `general.alignment`.
_DEFAULT_ALIGNMENT = 32

# Limits that are larger than in any real header, and so small that a malicious file cannot exhaust memory.
MAX_HEADER_BYTES = 128 << 20
_MAX_ARRAY_ELEMENTS = 4 << 20
_MAX_ARRAYS = 1 << 15
_MAX_TENSORS = 1 << 16
_MAX_KEYS = 1 << 14
_MAX_NAME_BYTES = 1024
_MAX_ARRAY_DEPTH = 4
# `GGML_MAX_DIMS` of llama.cpp, which writes these files.
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 16

_FIRST_READ = 1 << 16
_WINDOW = 1 << 16  # bytes that one search for short strings covers
_FEW = 1024  # for fewer strings, the search takes longer than reading the lengths one by one
_TRUNCATED = "the file is truncated"

_T = TypeVar("_T")

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class StringArray(Sequence[str]):  # noqa: PLW1641  # like a list, it has no hash
    """An array of strings in a header, decoded when they are read.

    Indexing and iteration decode all strings. Decoding raises a ModelFileError if a string is not valid UTF-8.

    Args:
        data: the strings, each after its length in 8 bytes.
        ends: for each string, the position in `data` after its last byte.
        where: file and key, for error messages.
    """

    def __init__(self, data: bytes, ends: "array[int]", where: str) -> None:
        # Strings are decoded only when they are read: most of a header is the vocabulary, of which an engine needs only
        # the number of tokens.
        self._data = data
        self._ends = ends
        self._where = where

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[str]:
        return iter(self._strings)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, StringArray | list) else NotImplemented

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        return self._strings[index]

    def some(self, indices: Sequence[int]) -> list[str]:
        """Return the strings at `indices`, without decoding the others."""
        begins = [self._ends[index - 1] if index else 0 for index in indices]
        return self._decoded(begins, [self._ends[index] for index in indices])

    @cached_property
    def _strings(self) -> list[str]:
        ends = self._ends.tolist()
        return self._decoded([0, *ends[:-1]], ends)

    def _decoded(self, begins: Sequence[int], ends: Sequence[int]) -> list[str]:
        data = self._data
        try:
            return [data[begin + 8 : end].decode() for begin, end in zip(begins, ends, strict=False)]
        except UnicodeDecodeError:
            raise ModelFileError(f"{self._where}: the text is not valid UTF-8") from None


@dataclass(frozen=True)
class GgufTensor:
    """Type, shape and position of one tensor, from the tensor table of a GGUF file."""

    name: str  # the tensor's name in the file
    type: GgmlType  # ggml type of the elements
    # Dimensions in torch's order, slowest first. A linear layer with K inputs and N outputs has [N, K].
    shape: tuple[int, ...]
    offset: int  # first byte of the tensor, from the start of the file
    nbytes: int  # number of bytes of the tensor in the file


@dataclass(frozen=True)
class GgufHeader:
    """The validated header of a GGUF file."""

    size: int  # size of the file, in bytes
    version: int
    metadata: dict[str, Any]  # metadata by key: numbers, booleans, strings, lists, and arrays of strings
    tensors: dict[str, GgufTensor]  # the entries of the tensor table by tensor name, in file order


def read_header(path: Path, max_bytes: int = MAX_HEADER_BYTES) -> GgufHeader:
    """Return the header of the file at `path`, of at most `max_bytes` bytes.

    Raises:
        ModelFileError: the file cannot be read or is not a valid GGUF file.
    """
    try:
        with open_model_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            return _HeaderReader(file, path, size, max_bytes).parse()
    except OSError as error:
        raise ModelFileError(
            f"{path.name}: cannot be read: {error.strerror or error}", advice=UNREADABLE_FILE
        ) from error


def is_name(value: Any) -> TypeGuard[str]:
    """Return whether a header value is a string that is printable and short.

    Only such strings are quoted in error messages.
    """
    return isinstance(value, str) and len(value) <= _MAX_NAME_BYTES and value.isprintable()


def is_list_of(values: Any, *kinds: type[_T]) -> TypeGuard[Sequence[_T]]:
    """Return whether a GGUF header's value is a list with entries of types `kinds`."""
    if isinstance(values, StringArray):
        return str in kinds
    return isinstance(values, list) and all(issubclass(kind, kinds) for kind in set(map(type, values)))


class _HeaderReader:
    """Parser for the header of one GGUF file, which it reads once from the beginning."""

    def __init__(self, file: BinaryIO, path: Path, size: int, max_bytes: int) -> None:
        self._file = file
        self._path = path
        self._size = size
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._position = 0
        # The limits count the elements of all arrays together, so that many small arrays cannot exhaust memory either.
        self._elements_left = _MAX_ARRAY_ELEMENTS
        self._arrays_left = _MAX_ARRAYS
        self._one_by_one = 1  # number of strings whose lengths are read before the next search for short strings
        self._where = "header"

    def parse(self) -> GgufHeader:
        if self._read_bytes(4) != _MAGIC:
            self._fail("the file is not a GGUF file")
        version = self._integer("<I")
        if version not in _VERSIONS:
            raise self._unsupported(
                f"GGUF version {version} is not supported, only 2 and 3 in little-endian byte order"
            )
        tensor_count = self._integer("<Q")
        key_count = self._integer("<Q")
        for kind, count, limit in (("tensors", tensor_count, _MAX_TENSORS), ("keys", key_count, _MAX_KEYS)):
            if count > limit:
                self._fail(f"the header claims {count} {kind}, more than the limit of {limit}")
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
                self._fail("the key appears twice in the header")
            metadata[key] = self._value(self._integer("<I"), depth=0)
        return metadata

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self._where = "key general.alignment"
            self._fail(f"the alignment is {str(alignment)[:40]}, expected a power of two from 8 to {_MAX_ALIGNMENT}")
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
                self._fail("the tensor appears twice in the header")
            if data + offset + nbytes > self._size:
                self._fail("the file is truncated: the data of the tensor ends beyond the end of the file")
            tensors[name] = GgufTensor(name, kind, shape, data + offset, nbytes)
        # Reject overlapping tensors, with which a small file could describe a large model.
        for previous, following in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
            if previous.offset + previous.nbytes > following.offset:
                self._where = f"tensor {following.name}"
                self._fail(f"the tensor shares bytes with tensor {previous.name}")
        return tensors

    def _row(self, name: str, alignment: int) -> tuple[GgmlType, tuple[int, ...], int, int]:
        dimensions = self._integer("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._fail(f"the tensor has {dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}")
        shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", self._read_bytes(8 * dimensions))))
        type_id = self._integer("<I")
        offset = self._integer("<Q")
        if type_id not in GgmlType.__members__.values():
            raise self._unsupported(f"the tensor has the unknown type {type_id}")
        kind = GgmlType(type_id)
        if kind not in BLOCK_SIZES:
            raise self._unsupported(f"the tensor has the type {kind.name}, which is not supported")
        elements, block_bytes = BLOCK_SIZES[kind]
        if 0 in shape:
            self._fail(f"the tensor has an empty dimension in its shape {list(shape)}")
        if shape[-1] % elements:
            self._fail(f"rows of {shape[-1]} elements do not divide into {kind.name} blocks of {elements} elements")
        if offset % alignment:
            self._fail(f"the offset of the tensor, {offset}, is not a multiple of the alignment, {alignment}")
        # Python integers do not overflow, so an oversized product fails the check against the file size.
        return kind, shape, offset, math.prod(shape) // elements * block_bytes

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind == _ARRAY:
            return self._array(depth + 1)
        return self._numbers(kind, 1)[0]

    def _array(self, depth: int) -> list[Any] | StringArray:
        if depth > _MAX_ARRAY_DEPTH:
            self._fail(f"arrays are nested too deep, more than {_MAX_ARRAY_DEPTH} levels")
        kind = self._integer("<I")
        count = self._integer("<Q")
        if count > self._elements_left:
            self._fail(f"an array of {count} elements is too long; all arrays may have {_MAX_ARRAY_ELEMENTS} together")
        self._elements_left -= count
        if kind == _ARRAY:
            self._arrays_left -= count
            if self._arrays_left < 0:
                self._fail(f"an array of {count} arrays is too long; a file may have {_MAX_ARRAYS} inner arrays")
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

    def _strings(self, count: int) -> StringArray:
        """Return the next `count` strings without decoding them."""
        # Only their lengths are read, because a vocabulary has up to a million strings.
        start, ends = self._position, array("q")
        # The fast search needs numpy. The sandbox process of a tokenizer does not import numpy, because numpy reserves
        # memory for one thread per processor, and the memory of the process is limited. There, the search would save
        # little time, because the process decodes all strings.
        searches = "numpy" in sys.modules
        while (left := count - len(ends)) > 0:
            found = array("q")
            if searches and left >= _FEW:
                found = _ends_of_short_strings(self._data, self._position, start)[:left]
                if len(found) < _FEW:
                    # The search has stopped early. Read some lengths one by one before the next search. Their number
                    # doubles each time, because the search may miss most strings of an array.
                    left = min(self._one_by_one, left)
                    self._one_by_one *= 2
            ends += found if len(found) >= _FEW else self._ends(left, start)
            self._position = start + ends[-1]
        return StringArray(bytes(self._data[start : self._position]), ends, f"{self._path.name}: {self._where}")

    def _ends(self, count: int, start: int) -> "array[int]":
        """Return the ends of the next `count` strings, relative to `start`."""
        unpack, position, ends = struct.Struct("<Q").unpack_from, self._position, array("q")
        while len(ends) < count:
            data = self._data
            try:
                for _ in range(count - len(ends)):
                    position += 8 + unpack(data, position)[0]
                    ends.append(position - start)
            except (struct.error, OverflowError):
                self._require(position + 8)
        self._require(position)
        return ends

    def _name(self) -> str:
        length = self._integer("<Q")
        if length > _MAX_NAME_BYTES:
            self._fail(f"the name is {length} bytes long, more than the limit of {_MAX_NAME_BYTES}")
        try:
            name = self._read_bytes(length).decode()
        except UnicodeDecodeError:
            self._fail("the name is not valid UTF-8")
        if not name or not name.isprintable():
            self._fail("the name is empty or not printable")
        return name

    def _integer(self, layout: str) -> int:
        return struct.unpack(layout, self._read_bytes(struct.calcsize(layout)))[0]

    def _read_bytes(self, nbytes: int) -> bytes:
        start, self._position = self._position, self._position + nbytes
        self._require(self._position)
        return bytes(self._data[start : self._position])

    def _require(self, end: int) -> None:
        """Read the file up to the byte `end`; each read at least doubles the data."""
        if end > min(self._size, self._max_bytes):
            self._beyond(end)
        if end > len(self._data):
            self._data += self._file.read(max(end - len(self._data), len(self._data), _FIRST_READ))
        if end > len(self._data):
            self._fail(_TRUNCATED)

    def _beyond(self, end: int) -> NoReturn:
        self._fail(_TRUNCATED if end > self._size else f"the header is larger than {self._max_bytes >> 20} MiB")

    def _unsupported(self, problem: str) -> ModelFileError:
        return ModelFileError(
            f"{self._path.name}: {self._where}: {problem}", advice="load another file of the model, or update helexa"
        )

    def _fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self._path.name}: {self._where}: {problem}")


def _ends_of_short_strings(data: bytearray, position: int, start: int) -> "array[int]":
    """Return the ends of the next strings of 1 to 255 bytes, relative to `start`.

    The result ends before the first string of another length. The 8-byte length of a string with 1 to 255 bytes ends
    with seven zero bytes, which hardly ever occur in texts. The function therefore finds all lengths at once, in a
    tenth of the time that reading one length after the other takes.
    """
    import numpy as np

    count = min(len(data) - position, _WINDOW) - 7
    if count <= 0:
        return array("q")
    words = np.ndarray((count,), "<u8", data, position, (1,))  # the 8 bytes at each position
    begins = np.flatnonzero(words < 256)
    ends = begins + 8 + words[begins].astype(np.int64)
    # A word is the length of a string only if it begins where the previous string ends.
    wrong = np.flatnonzero(begins != np.concatenate(([0], ends[:-1])))
    ends = ends[: wrong[0]] if len(wrong) else ends
    return array("q", (ends[ends <= len(data) - position] + (position - start)).astype(np.int64).tobytes())
