"""Disk cache of packed weights, which makes later starts of a model faster.

Packed weights are matrices in the tile layout of the native kernels. The cache has one file per model, version of the
packing code, and quantization. The file name is a digest of all three. A file consists of one line of JSON and the
packed matrices. The total size of the files is limited, and the least recently used files are removed first.
"""

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.packed import HugeMemory, PackedMatrix
from helexa.neuron.processes import heartbeat
from helexa.neuron.weights.gguf.files import part_names

_log = logging.getLogger("helexa.neuron.ops")
_LIMIT = 64 << 30  # maximum total size of all files
_SMALLEST = 16 << 20  # minimum size of a stored model; smaller models are packed quickly
_RESERVED = 4 << 30  # disk space left free for other uses
_MAX_HEADER = 16 << 20
_READ = 16 << 20
_ALIGNMENT = 64
_STALE_SECONDS = 3600

_Entry = tuple[int, int, int, int | None]  # offset, outputs, columns, number of the format


class PackedStore:
    """The packed weights of one model, in memory and in a file.

    The constructor reads the weights from the file. Without a file, the loader packs the weights of the checkpoint,
    adds them with `add`, and then calls `save`.

    Args:
        folder: folder with the files of all models.
        key: text that identifies the model files, the packing code and the quantization.
        threads: number of threads that read the file.
    """

    def __init__(self, library: KernelLibrary, folder: Path, key: str, threads: int) -> None:
        self._library = library
        self._path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.tiles"
        self._matrices: dict[str, PackedMatrix] = {}
        self._from_disk = False
        try:
            self._matrices = self._read(threads)
            self._from_disk = bool(self._matrices)
            if self._from_disk:
                os.utime(self._path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            _log.warning("packed weights in %s cannot be used: %s", self._path.name, error)

    def get(self, name: str, shape: tuple[int, ...]) -> PackedMatrix | None:
        """Return the matrix with the name `name`, or None if the store has no matrix of this name and shape."""
        matrix = self._matrices.get(name)
        return matrix if matrix is not None and (matrix.outputs, matrix.columns) == shape else None

    def add(self, name: str, matrix: PackedMatrix) -> None:
        """Add a matrix that was packed from the checkpoint. Only `save` writes the matrix to disk."""
        self._matrices[name] = matrix

    def save(self) -> threading.Thread | None:
        """Start a background thread that writes the added matrices to disk, and return the thread.

        Returns:
            The thread; None if the matrices came from disk, or if their total size is less than 16 MiB.
        """
        if self._from_disk or sum(matrix.data.nbytes for matrix in self._matrices.values()) < _SMALLEST:
            return None
        thread = threading.Thread(target=self._write, name="packed-store", daemon=True)
        thread.start()
        return thread

    def _read(self, threads: int) -> dict[str, PackedMatrix]:
        with self._path.open("rb", buffering=0) as file:
            total = os.fstat(file.fileno()).st_size
            line = os.pread(file.fileno(), min(total, _MAX_HEADER), 0).partition(b"\n")[0]
            header = msgspec.json.decode(line, type=dict[str, _Entry])
            start = _aligned(len(line) + 1)
            if start > total:
                raise ValueError("the file ends within its header")
            matrices: dict[str, PackedMatrix] = {}
            data = HugeMemory(total - start).take(total - start)
            for name, (offset, outputs, columns, number) in header.items():
                size = self._library.packed_bytes(number, outputs, columns)
                if offset < 0 or size <= 0 or offset + size > len(data):
                    raise ValueError(f"{name} lies outside the file")
                matrices[name] = PackedMatrix(data[offset : offset + size], outputs, columns, number)
            view = data.numpy().data

            def fill(at: int) -> None:
                buffer = view[at : at + _READ]
                while buffer:
                    count = os.preadv(file.fileno(), [buffer], start + at)
                    if count == 0:
                        raise ValueError("the file ends early")
                    at, buffer = at + count, buffer[count:]
                    heartbeat.beat()

            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(fill, range(0, len(data), _READ)))
        return matrices

    def _write(self) -> None:
        partial = self._path.with_suffix(f".partial-{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            size = sum(_aligned(matrix.data.nbytes) for matrix in self._matrices.values())
            self._free_space(size)
            header: dict[str, _Entry] = {}
            offset = 0
            for name, matrix in self._matrices.items():
                header[name] = (offset, matrix.outputs, matrix.columns, matrix.number)
                offset += _aligned(matrix.data.nbytes)
            line = msgspec.json.encode(header) + b"\n"
            with partial.open("wb") as file:
                file.write(line.ljust(_aligned(len(line)), b"\0"))
                for matrix in self._matrices.values():
                    file.write(matrix.data.numpy().data)
                    file.write(bytes(_aligned(matrix.data.nbytes) - matrix.data.nbytes))
            partial.replace(self._path)
        except OSError as error:
            _log.warning("packed weights were not saved: %s", error)
            partial.unlink(missing_ok=True)

    def _free_space(self, size: int) -> None:
        """Remove the least recently used files until there is space for a file of `size` bytes.

        Raises:
            OSError: the new file exceeds the size limit of the folder, or the disk has too little free space even
                after the removal of all other files.
        """
        for stale in self._path.parent.glob("*.partial-*"):
            if time.time() - stale.stat().st_mtime > _STALE_SECONDS:
                stale.unlink(missing_ok=True)
        stored = sorted(_files(self._path.parent))
        total = sum(bytes_ for _, bytes_, _ in stored)
        while stored and (total + size > _LIMIT or shutil.disk_usage(self._path.parent).free < size + _RESERVED):
            _, bytes_, oldest = stored.pop(0)
            oldest.unlink(missing_ok=True)
            total -= bytes_
        if shutil.disk_usage(self._path.parent).free < size + _RESERVED or size > _LIMIT:
            raise OSError("too little disk space")


def fingerprint(model: Path) -> str:
    """Return a digest that identifies the current contents of a model's files.

    The digest covers the name, size and modification time of each file, and samples of the file's bytes.

    Args:
        model: folder of the model, or path of a GGUF file.
    """
    digest = hashlib.sha256()
    files = model.iterdir() if model.is_dir() else (model.with_name(name) for name in part_names(model.name))
    for path in sorted(files):
        if not path.is_file():
            continue
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        with path.open("rb", buffering=0) as file:
            for at in (0, *range(0, status.st_size, max(status.st_size // 64, 1))):
                digest.update(os.pread(file.fileno(), 4096, at))
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    for path in folder.glob("*.tiles"):
        status = path.stat()
        yield status.st_mtime, status.st_size, path


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
