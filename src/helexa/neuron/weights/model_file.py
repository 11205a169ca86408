"""Read model files, which are untrusted: JSON objects, and the bytes of tensors.

Only regular files are opened, because other files may block for ever. The bytes of tensors are memory-mapped, with one
mapping per tensor. A mapping is released together with its array, so the file does not stay in memory.
"""

import json
import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from helexa.core.errors import UNREADABLE_FILE, ModelFileError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# Maximum size of a header or an index in bytes: larger than any real file, but too small to exhaust memory.
MAX_JSON_BYTES = 32 << 20

# Maximum size of a configuration file in bytes. The server parses it, and all requests wait for the parser.
MAX_CONFIG_BYTES = 4 << 20

# File of an embedding model of Sentence Transformers: its modules, in the order in which they process a text.
MODULES_FILE = "modules.json"


def open_model_file(path: Path, buffering: int = -1) -> BinaryIO:
    """Open the regular file at `path` for reading.

    Raises:
        ModelFileError: `path` is a folder or a special file.
        OSError: the file cannot be opened.
    """
    # The first check avoids opening a device, which might react to it. Only the second check is reliable, because
    # another process may replace the file in between.
    _check_regular(path, path.stat())
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb", buffering=buffering)
    except BaseException:
        os.close(descriptor)
        raise


def read_model_file(path: Path, max_bytes: int) -> bytes:
    """Return the contents of the regular file at `path`.

    Raises:
        ModelFileError: `path` is a folder or a special file, or the file is larger than `max_bytes`.
        OSError: the file cannot be read.
    """
    with open_model_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ModelFileError(f"{path.name} is larger than {max_bytes >> 20} MiB")
    return data


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"{path.name} is not a regular file")


def read_json(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in the file at `path`.

    Raises:
        ModelFileError: the file cannot be read, is larger than `max_bytes`, or does not contain a valid JSON object.
    """
    try:
        with open_model_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise ModelFileError(f"{path.name}: the file is larger than the limit of {max_bytes >> 20} MiB")
            return parse_json(stream.read(size), path)
    except OSError as error:
        raise ModelFileError(
            f"{path.name}: cannot be read: {error.strerror or error}", advice=UNREADABLE_FILE
        ) from error


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """Parse `text`, the contents of the file `path`, and return the JSON object.

    Raises:
        ModelFileError: `text` is not a valid JSON object, or an object has duplicate keys.
    """
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name}: the file is not valid JSON: {error}", advice="replace the file") from error
    if not isinstance(parsed, dict):
        raise ModelFileError(f"{path.name}: the file is not a JSON object", advice="replace the file")
    return parsed


def _reject_duplicate_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("a key appears twice in an object")
    return parsed


# Keys that end with `_config` and belong to the text model. Other keys with this ending belong to other modalities.
_OF_TEXT = {"dual_chunk_attention_config", "quantization_config", "per_layer_config", "eagle_config"}
_TIED = "tie_word_embeddings"


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's part of the configuration in a model file.

    The keys of a nested `text_config` are moved to the top level and override keys of `config`. The suffix `_text` is
    removed from `model_type`. The result has no configurations of other modalities, and no `tie_word_embeddings` if
    the values in `config` and `text_config` differ.

    Raises:
        ModelFileError: `text_config` is not an object.
    """
    inner = config.get("text_config", {})
    if not isinstance(inner, dict):
        raise ModelFileError("config: 'text_config' is not an object")
    outer = {key: value for key, value in config.items() if key in _OF_TEXT or not key.endswith("_config")}
    flat = {**outer, **inner}
    if _TIED in config and _TIED in inner and config[_TIED] != inner[_TIED]:
        # Versions of transformers differ in which of the two settings they read. Without the setting, the tensors of
        # the model decide.
        del flat[_TIED]
    if isinstance(flat.get("model_type"), str):
        flat["model_type"] = flat["model_type"].removesuffix("_text")
    return flat


@dataclass(frozen=True, eq=False)
class Part:
    """Rows (first dimension) and columns (last) to read of a tensor in a model file."""

    rows: "NDArray[np.int64] | None" = None  # int64, numbers of the rows in the order of the result; None for all rows
    # int64, numbers of the columns in the order of the result; None for all columns. Only tensors with two dimensions
    # can be read by columns.
    columns: "NDArray[np.int64] | None" = None

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor with the shape `whole`."""
        shape = list(whole)
        if self.rows is not None:
            shape[0] = len(self.rows)
        if self.columns is not None:
            shape[-1] = len(self.columns)
        return tuple(shape)


WHOLE = Part()  # All rows and all columns


def block_numbers(columns: "NDArray[np.int64]", width: int) -> "NDArray[np.int64] | None":
    """Return the numbers of the blocks of `width` columns that make up `columns`.

    Return None if `columns` has a part of a block, or a block whose columns are in another order.
    """
    import numpy as np  # the server process reads only headers and starts faster without numpy

    first = columns[::width]
    complete = len(columns) % width == 0 and not (first % width).any()
    if not complete or not np.array_equal(columns.reshape(-1, width), first[:, None] + np.arange(width)):
        return None
    return first // width


class TensorFile:
    """A model file from which the bytes of tensors are read, by memory mappings.

    A mapping must not be used after the load, because the operating system kills a process that reads mapped bytes of a
    file that was truncated.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size  # size of the file in bytes when its header was read and validated
        self._file: BinaryIO | None = None

    def read(self, offset: int, nbytes: int, tensor: str, ahead: bool = True) -> "np.ndarray":
        """Return the `nbytes` bytes from `offset` as uint8, in a private memory mapping.

        Args:
            offset: first byte, from the start of the file.
            tensor: name of the tensor, for error messages.
            ahead: whether the operating system shall read all of the bytes ahead of their use.

        Raises:
            ModelFileError: the file cannot be read or has changed since its header was read.
        """
        import numpy as np  # the server process reads only headers and starts faster without numpy

        if nbytes == 0:
            return np.empty(0, np.uint8)
        # A mapping must begin at a multiple of the granularity.
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            descriptor = self._opened().fileno()
            if os.fstat(descriptor).st_size != self.size:
                raise ModelFileError(
                    f"{self.path.name}: the file has changed on disk since its header was read",
                    advice="load the model again",
                )
            mapping = mmap.mmap(descriptor, offset - start + nbytes, offset=start, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelFileError(
                f"{self.path.name}: cannot read tensor {tensor}: {error.strerror or error}", advice=UNREADABLE_FILE
            ) from error
        if ahead and hasattr(mmap, "MADV_WILLNEED"):
            mapping.madvise(mmap.MADV_WILLNEED)
        return np.frombuffer(mapping, np.uint8, nbytes, offset - start)

    def read_part(self, offset: int, shape: tuple[int, int, int], part: Part, tensor: str) -> "np.ndarray":
        """Return the bytes of some rows and columns of a matrix, row by row, as uint8.

        If the rows are adjacent and complete, the array is a memory mapping as in `read`. Otherwise it is a copy.

        Args:
            offset: first byte of the matrix, from the start of the file.
            shape: number of rows, number of columns, and bytes of a column in a row. A column is a single number or a
                quantization block.
            tensor: name of the tensor, for error messages.

        Raises:
            ModelFileError: the file cannot be read or has changed since its header was read.
            IndexError: the matrix does not have all rows of `part`.
        """
        import numpy as np

        count, columns, nbytes = shape
        rows = np.arange(count) if part.rows is None else part.rows
        first, stop = int(rows.min(initial=count)), int(rows.max(initial=-1)) + 1
        if first < 0 or stop > count:
            raise IndexError(f"tensor {tensor} has {count} rows, not rows {first} to {stop - 1}")
        span = max(stop - first, 0)
        stored = self.read(
            # `ahead` is false if rows of the range are skipped, because reading ahead would also read these rows.
            offset + first * columns * nbytes,
            span * columns * nbytes,
            tensor,
            ahead=len(rows) >= span,
        ).reshape(span, columns, nbytes)
        if part.columns is not None:
            stored = _take(stored, part.columns, axis=1)
        return np.ascontiguousarray(_take(stored, rows - first, axis=0)).reshape(-1)

    def close(self) -> None:
        """Close the file. A later read opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = open_model_file(self.path, buffering=0)
        return self._file


def _take(values: "np.ndarray", numbers: "np.ndarray", axis: int) -> "np.ndarray":
    """Return the entries `numbers` of an axis, as a view if they are adjacent."""
    import numpy as np

    if len(numbers) and (np.diff(numbers) == 1).all():
        chosen = slice(int(numbers[0]), int(numbers[-1]) + 1)
        return values[:, chosen] if axis else values[chosen]
    return np.take(values, numbers, axis)
