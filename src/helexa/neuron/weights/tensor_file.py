"""Read the bytes of tensors from a model file, with one memory mapping per tensor.

A mapping is released together with its array, so the file does not stay in memory.
"""

import mmap
import os
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from helexa.core.errors import ModelFileError
from helexa.neuron.weights.part import Part

if TYPE_CHECKING:
    import numpy as np


class TensorFile:
    """A model file from which the bytes of tensors are read. The first read opens the file.

    Tensors are memory-mapped, which avoids a copy. A mapping must not be used after the load, because the operating
    system kills a process that reads mapped bytes of a file that was truncated.

    Args:
        path: path of the file.
        size: size of the file in bytes when its header was read and validated.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._file: FileIO | None = None

    def read(self, offset: int, nbytes: int, tensor: str, ahead: bool = True) -> "np.ndarray":
        """Return the `nbytes` bytes from `offset` as a uint8 array. Writing to the array does not change the file.

        The array is a memory mapping, which is released together with the array.

        Args:
            offset: first byte, from the start of the file.
            nbytes: number of bytes.
            tensor: name of the tensor, for error messages.
            ahead: whether the operating system shall read all of the bytes ahead of their use.

        Raises:
            ModelFileError: the file cannot be read or has changed since its header was read.
        """
        import numpy as np  # the server process reads only headers and starts faster without numpy

        if nbytes == 0:
            return np.empty(0, np.uint8)
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            descriptor = self._opened().fileno()
            if os.fstat(descriptor).st_size != self.size:
                raise ModelFileError(f"{self.path.name}: changed on disk since its header was read")
            mapping = mmap.mmap(descriptor, offset - start + nbytes, offset=start, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelFileError(f"{self.path.name}: cannot read tensor {tensor}: {error.strerror or error}") from error
        if ahead and hasattr(mmap, "MADV_WILLNEED"):
            mapping.madvise(mmap.MADV_WILLNEED)
        return np.frombuffer(mapping, np.uint8, nbytes, offset - start)

    def read_part(self, offset: int, shape: tuple[int, int, int], part: Part, tensor: str) -> "np.ndarray":
        """Return the bytes of some rows and columns of a matrix as a uint8 array, one row after the other.

        If the rows are adjacent and complete, the array is a memory mapping as in `read`. Otherwise it is a copy.

        Args:
            offset: first byte of the matrix, from the start of the file.
            shape: number of rows, number of columns, and bytes of a column in a row. A column is a single number or a
                quantization block.
            part: rows and columns to read.
            tensor: name of the tensor, for error messages.

        Raises:
            ModelFileError: the file cannot be read or has changed since its header was read.
        """
        import numpy as np

        count, columns, nbytes = shape
        rows = np.arange(count) if part.rows is None else part.rows
        first, stop = int(rows.min(initial=count)), int(rows.max(initial=-1)) + 1
        if first < 0 or stop > count:
            raise IndexError(f"tensor {tensor} has {count} rows, not rows {first} to {stop - 1}")
        span = max(stop - first, 0)
        stored = self.read(
            offset + first * columns * nbytes, span * columns * nbytes, tensor, ahead=len(rows) >= span
        ).reshape(span, columns, nbytes)
        if part.columns is not None:
            stored = _take(stored, part.columns, axis=1)
        return np.ascontiguousarray(_take(stored, rows - first, axis=0)).reshape(-1)

    def close(self) -> None:
        """Close the file. A later read opens the file again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> FileIO:
        if self._file is None:
            self._file = FileIO(self.path)
        return self._file


def _take(values: "np.ndarray", numbers: "np.ndarray", axis: int) -> "np.ndarray":
    """Return the entries `numbers` of an axis: a view if the numbers are adjacent, else a copy."""
    import numpy as np

    if len(numbers) and (np.diff(numbers) == 1).all():
        chosen = slice(int(numbers[0]), int(numbers[-1]) + 1)
        return values[:, chosen] if axis else values[chosen]
    return np.take(values, numbers, axis)
