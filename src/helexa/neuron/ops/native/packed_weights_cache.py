"""Disk cache of packed weights, which makes later starts of a model faster.

Packed weights are matrices in the tile layout of the native kernels. The cache has one file per model, version of the
packing code, and quantization. The file name has the name of the model, a digest of its files and the quantization, and
a digest of the version. A file consists of one line of JSON and the packed matrices.

A start maps the file, which takes no time if the file is in the system's page cache. Later, a thread moves the weights
to huge pages.

All files together take at most a tenth of the disk, except for a single larger file. Before a file is written, files
that were not used for 30 days are removed, or for one day if a newer version exists. If more space is needed, files
with a newer version are removed first, then the least recently used files. A file that an engine has mapped is not
removed. The removal would free no space before the engine ends. On NFS, it would also crash engines of other hosts
(SIGBUS).
"""

import ctypes
import hashlib
import logging
import mmap
import os
import re
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from helexa.core.logs import quoted
from helexa.core.version import __version__
from helexa.neuron import tensors
from helexa.neuron.cache_folder import PACKED_SUFFIX
from helexa.neuron.ops.dense_ops import MatrixStore
from helexa.neuron.ops.native.kernel_library import KernelLibrary
from helexa.neuron.ops.native.packed_weights import PackedMatrix
from helexa.neuron.processes import heartbeat
from helexa.neuron.processes.file_locks_and_threads import is_used, mark_used
from helexa.neuron.processes.heaps_and_shared_memory import prefer_page_size
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.gguf.files import part_names

_NEURON = Path(__file__).parents[2]
_PACKAGES = ("layers", "models", "ops", "tensors", "weights")  # packages that read, permute, quantize and pack weights

_log = logging.getLogger("helexa.neuron.ops")
_LIMIT = 64 << 30  # maximum total size of all files, on any disk
_DISK_SHARE = 10  # all files together take at most 1 / _DISK_SHARE of the disk
_MAX_AGE_SECONDS = 30 * 86400
# Maximum time without use of a file that has a newer version. The time is not 0, because two versions of helexa on one
# machine may be used in turns.
_MAX_OLD_VERSION_SECONDS = 86400
_SMALLEST = 16 << 20  # minimum size of a stored model; smaller models are packed quickly
_RESERVED = 4 << 30  # disk space left free for other uses
_MAX_HEADER = 16 << 20  # maximum bytes of the line of JSON
_PART = 16 << 20  # bytes that are mapped or moved at once
_HUGE_PAGE = 2 << 20
# Bytes per write of an embedding. If a kernel reads one page of a file, Linux also maps the pages around it, together
# about as many bytes.
_LOOKED_UP_PART = 64 << 10
# Delay of the move to huge pages after a start. Without a delay, copying the weights would slow down the first tokens.
# Until the move, decoding is slower.
_MOVE_AFTER_SECONDS = 0.5
_POPULATE_READ = 22  # MADV_POPULATE_READ, which `mmap` does not name before Python 3.14
_MOVE_FLAGS = 1 | 2 | 4  # MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP
_ALIGNMENT = 64
_STALE_SECONDS = 3600  # an unfinished file of this age is removed, because the engine that wrote it has crashed

_Entry = tuple[int, int, int, int | None]  # offset, outputs, columns, number of the format


@cache
def loading_code_version() -> str:
    """Return a digest of the version and of all code that affects packed weights."""
    digest = hashlib.sha256(__version__.encode())
    for package in _PACKAGES:
        for path in sorted((_NEURON / package).rglob("*.py")):
            digest.update(f"\0{path.relative_to(_NEURON).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


class PackedStore(MatrixStore):
    """The packed weights of one model, in memory and in a file.

    The constructor maps the file. Without a file, the loader packs the weights of the checkpoint and adds them with
    `add`. In both cases, the loader then calls `finish`. `key` identifies the model files and the quantization,
    `version` the packing code, and `model` is the name of the model for the user.
    """

    def __init__(self, library: KernelLibrary, folder: Path, key: str, version: str = "", model: str = "model") -> None:
        self._library = library
        self._mapped: MappedWeights | None = None
        self._all_versions = f"{_file_name(model)}.{_short_digest(key)}"
        self._path = folder / f"{self._all_versions}.{_short_digest(version)}{PACKED_SUFFIX}"
        self._matrices: dict[str, PackedMatrix] = {}
        try:
            self._matrices = self._read()
            os.utime(self._path)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            _log.warning(
                "packed weights not used path=%s error=%s; loading takes longer", quoted(self._path), quoted(error)
            )

    def get(self, name: str, shape: tuple[int, ...]) -> PackedMatrix | None:
        """Return the matrix `name`; None if no matrix with this name and shape is stored."""
        matrix = self._matrices.get(name)
        return matrix if matrix is not None and (matrix.outputs, matrix.columns) == shape else None

    def add(self, name: str, matrix: PackedMatrix) -> None:
        """Add a matrix packed from the checkpoint.

        `finish` writes it to disk, unless the constructor mapped an existing file or the model is small.
        """
        self._matrices[name] = matrix

    def finish(self, looked_up: Sequence[PackedMatrix] = ()) -> threading.Thread | None:
        """Start and return a thread for the work after the load, or None.

        With a mapped file, the method first reads the file, and the thread moves the matrices to huge pages. Otherwise,
        the thread writes the added matrices to disk; None if they are smaller than 16 MiB. `looked_up`: see
        `MatrixStore.finish`.
        """
        if self._mapped is not None:
            # A step reads only the rows of its tokens from an embedding. The other pages of the file take no memory.
            self._mapped.leave([matrix.data for matrix in looked_up])
            self._mapped.populate()
            work = self._mapped.move_later
        elif sum(matrix.data.nbytes for matrix in self._matrices.values()) < _SMALLEST:
            return None  # small models are packed quickly
        else:
            work = partial(self._write, looked_up)
        thread = threading.Thread(target=work, name="packed-store", daemon=True)
        thread.start()
        return thread

    def _read(self) -> dict[str, PackedMatrix]:
        with self._path.open("rb") as file:
            total = os.fstat(file.fileno()).st_size
            line = file.readline(_MAX_HEADER)
            header = msgspec.json.decode(line, type=dict[str, _Entry])
            start = _aligned(len(line))
            if start > total:
                raise ValueError("the file of packed weights ends within its header")
            mapped = MappedWeights(file, total)
            data = mapped.data[start:]
            matrices: dict[str, PackedMatrix] = {}
            for name, (offset, outputs, columns, number) in header.items():
                size = self._library.packed_bytes(number, outputs, columns)
                if offset < 0 or size <= 0 or offset + size > len(data):
                    raise ValueError(f"matrix {name} lies outside the file of packed weights")
                matrices[name] = PackedMatrix(data[offset : offset + size], outputs, columns, number)
            # If another process truncated the file, reading a lost page would end this process (SIGBUS). `finish` soon
            # reads and then copies the pages, so one check leaves little time for such a change.
            if os.fstat(file.fileno()).st_size != total:
                raise ValueError("another process changes the file of packed weights")
        # not earlier, because a damaged file must be replaced, and files that are marked as used are not replaced
        mark_used(self._path)
        self._mapped = mapped
        return matrices

    def _write(self, looked_up: Sequence[PackedMatrix]) -> None:
        # The name contains the time, because engines in two containers may have the same process id.
        unfinished = self._path.with_suffix(f".partial-{time.time_ns()}-{os.getpid()}")
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
            with unfinished.open("wb") as file:
                file.write(line.ljust(_aligned(len(line)), b"\0"))
                for matrix in self._matrices.values():
                    data = matrix.data.numpy().data
                    # Linux keeps the bytes of one write as one block of up to 2 MiB in the page cache. If one byte is
                    # read, Linux 6.18 maps the whole block. Small writes therefore save memory for an embedding.
                    part = _LOOKED_UP_PART if any(matrix is other for other in looked_up) else len(data)
                    for start in range(0, len(data), part):
                        file.write(data[start : start + part])
                    file.write(bytes(_aligned(matrix.data.nbytes) - matrix.data.nbytes))
            if is_used(self._path):  # another engine wrote and mapped the same weights in the meantime
                unfinished.unlink()
            else:
                unfinished.replace(self._path)
        except OSError as error:
            _log.warning(
                "packed weights not saved path=%s error=%s; the next load takes as long as this one",
                quoted(self._path),
                quoted(error),
            )
            unfinished.unlink(missing_ok=True)

    def _free_space(self, size: int) -> None:
        """Remove outdated files, then further files until a file of `size` bytes fits.

        Raises:
            OSError: the removal does not free enough space.
        """
        for stale in self._path.parent.glob("*.partial-*"):
            with suppress(OSError):  # another engine has renamed or deleted the file; on NFS, the error is ESTALE
                if time.time() - stale.stat().st_mtime > _STALE_SECONDS:
                    stale.unlink()
        now, limit = time.time(), min(_LIMIT, shutil.disk_usage(self._path.parent).total // _DISK_SHARE)
        stored = _in_order_of_removal(self._path.parent, self._all_versions)
        total = sum(file.size for file in stored)
        for file in stored:
            expired = now - file.used > (_MAX_AGE_SECONDS if file.newest else _MAX_OLD_VERSION_SECONDS)
            removed = expired or total + size > limit or shutil.disk_usage(self._path.parent).free < size + _RESERVED
            if removed and not is_used(file.path):
                file.path.unlink(missing_ok=True)
                total -= file.size
        if shutil.disk_usage(self._path.parent).free < size + _RESERVED or size > _LIMIT:
            raise OSError(
                f"the packed weights need {size >> 20} MiB; the limit is {_LIMIT >> 20} MiB, "
                f"and {_RESERVED >> 20} MiB of the disk must stay free; free disk space"
            )


class MappedWeights:
    """A mapped file of weights, which can move to huge pages while kernels read it.

    A copy during the load of a small model would take longer than all other work of the load. Without huge pages,
    decoding of one sequence took 1 to 5 % longer on Zen 4, and 1.6 times as long on Sapphire Rapids in a virtual
    machine.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        # The memory is writable only because torch warns of tensors in read-only memory.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        self._memory = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, protection)
        self.data = tensors.frombuffer(self._memory, dtype=tensors.uint8)
        self._used = [(0, size)]  # the ranges (start, end) that each step reads

    def leave(self, parts: Sequence[Tensor]) -> None:
        """Exclude `parts` of `data` from `populate` and `move`.

        The system reads the pages of these parts when a kernel reads them. Parts of other tensors have no effect.
        """
        end, used = 0, list[tuple[int, int]]()
        offsets = {tensors.address(part) - tensors.address(self.data): part.nbytes for part in parts}
        for start in sorted(offsets):
            if 0 <= start < len(self.data):  # otherwise the part does not belong to `data`
                used.append((end, start))
                end = start + offsets[start]
        self._used = [*used, (end, len(self.data))]

    def populate(self) -> None:
        """Read all parts that `leave` has not excluded, and fill the page table."""
        for start, end in self._used:
            for at in range(start // mmap.PAGESIZE * mmap.PAGESIZE, end, _PART):
                size = min(_PART, end - at)
                with suppress(OSError, AttributeError):  # otherwise the first step reads the pages
                    self._memory.madvise(mmap.MADV_WILLNEED, at, size)
                    self._memory.madvise(_POPULATE_READ, at, size)
                heartbeat.beat()

    def move_later(self) -> None:
        """Wait until the start has ended, then move the weights to huge pages."""
        time.sleep(_MOVE_AFTER_SECONDS)
        if not self.move():
            _log.info("packed weights stay in small pages; the system has no huge pages or no MREMAP_DONTUNMAP")

    def move(self) -> bool:
        """Move the weights that fill whole huge pages; return whether all of them moved."""
        copies = mmap.mmap(-1, _PART + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if not prefer_page_size(copies, huge=True):
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mremap.restype = ctypes.c_void_p
        libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        source = tensors.address(tensors.frombuffer(copies, dtype=tensors.uint8))
        aligned = -source % _HUGE_PAGE
        base = tensors.address(self.data)
        for start, end in self._used:
            last = (base + end) // _HUGE_PAGE * _HUGE_PAGE - base
            for at in range(start + -(base + start) % _HUGE_PAGE, last, _PART):
                size = min(_PART, last - at)
                ctypes.memmove(source + aligned, base + at, size)
                # `mremap` puts the copied pages in the place of the file's pages in one step, so that kernels read
                # either the file's page or its copy. Afterwards, `copies` has new, empty pages.
                if libc.mremap(source + aligned, size, size, _MOVE_FLAGS, base + at) != base + at:
                    return False
        return True


def fingerprint(model: Path) -> str:
    """Return a digest that changes if a model's files change.

    `model` is a folder or the path of a GGUF file. The digest covers names, sizes, modification times, and samples of
    the contents.
    """
    digest = hashlib.sha256()
    files = model.iterdir() if model.is_dir() else (model.with_name(name) for name in part_names(model.name))
    for path in sorted(files):
        if not path.is_file():
            continue
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        with path.open("rb", buffering=0) as file:
            # The digest contains only samples of the file, because a model has many gigabytes.
            for at in (0, *range(0, status.st_size, max(status.st_size // 64, 1))):
                digest.update(os.pread(file.fileno(), 4096, at))
    return digest.hexdigest()


class _StoredFile(NamedTuple):
    newest: bool  # whether no file of the same weights with another version was used later
    used: float  # time of last use, in seconds since 1970
    size: int
    path: Path


def _in_order_of_removal(folder: Path, written: str) -> list[_StoredFile]:
    """Return the stored files in order of removal.

    `written` identifies the weights that are about to be written. Their stored files count as old versions.
    """
    found: list[tuple[float, int, Path]] = []
    for path in folder.glob(f"*{PACKED_SUFFIX}"):
        with suppress(OSError):  # another engine has deleted the file; on NFS, the error is ESTALE
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    newer, files = {written}, list[_StoredFile]()
    for used, size, path in sorted(found, reverse=True):
        all_versions = path.stem.rpartition(".")[0] or path.stem
        files.append(_StoredFile(all_versions not in newer, used, size, path))
        newer.add(all_versions)
    return sorted(files)


def _file_name(model: str) -> str:
    """Return a model's name without characters that file names cannot contain."""
    return re.sub(r"[^\w.-]", "_", model.replace("/", "--"))[:80]


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
