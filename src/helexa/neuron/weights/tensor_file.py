"""A model file's tensor bytes, read piece by piece so that nothing of the file stays resident."""

import os
from io import FileIO
from pathlib import Path

import numpy as np

from helexa.core.errors import ModelFileError


class TensorFile:
    """Bytes of a file whose header was checked against `size`; opened at the first read."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._file: FileIO | None = None

    def read(self, offset: int, nbytes: int, tensor: str) -> np.ndarray:
        """`nbytes` bytes from `offset` as a fresh, writable uint8 array; `tensor` is named if that fails.

        Raises:
            ModelFileError: when the file cannot be read or has changed since its header was read.
        """
        try:
            file = self._opened()
            buffer = np.empty(nbytes, np.uint8)
            view = buffer.data
            file.seek(offset)
            done = 0
            while done < nbytes:
                count = file.readinto(view[done:])
                if not count:
                    raise ModelFileError(f"{self.path.name}: truncated in tensor {tensor}")
                done += count
        except OSError as error:
            raise ModelFileError(f"{self.path.name}: cannot read tensor {tensor}: {error.strerror or error}") from error
        return buffer

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> FileIO:
        if self._file is None:
            file = FileIO(self.path)
            if os.fstat(file.fileno()).st_size != self.size:
                file.close()
                raise ModelFileError(f"{self.path.name}: changed on disk since its header was read")
            self._file = file
        return self._file
