"""Read tensor bytes of a model file through one memory mapping per tensor, so that the file does not stay resident."""

import mmap
import os
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from helexa.core.errors import ModelFileError

if TYPE_CHECKING:
    import numpy as np


class TensorFile:
    """A model file of `size` bytes with a validated header; opened at the first read.

    Mapping avoids a copy, but a mapping must not outlive the load: if the file shrinks, the operating system kills a
    process that reads the missing bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._file: FileIO | None = None

    def read(self, offset: int, nbytes: int, tensor: str) -> "np.ndarray":
        """Return `nbytes` bytes from `offset` as a uint8 array; writes do not change the file.

        Pages are loaded on first access and released with the array.

        Args:
            tensor: name of the tensor, for error messages.

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
        if hasattr(mmap, "MADV_WILLNEED"):
            mapping.madvise(mmap.MADV_WILLNEED)
        return np.frombuffer(mapping, np.uint8, nbytes, offset - start)

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> FileIO:
        if self._file is None:
            self._file = FileIO(self.path)
        return self._file
