"""Files with KV pages and state snapshots.

A *namespace* is a folder for the pages of one model with one set of settings. The set contains everything that changes
the contents of a page, such as the model's files, the kernels and the format of the KV cache (see the function
`namespace`). A namespace contains append-only *segments*. A segment is a series of records. A record
contains a page, a window page, a snapshot or a prompt's name, with a key and a checksum. An engine writes to segments
of its own, so several engines can use one namespace. The index of the records is in memory, and is rebuilt from the
segments when the namespace is opened.

A record that is incomplete, changed or missing counts as not found. The engine then computes the part of the prompt
for which it needed the record.
"""

import hashlib
import logging
import os
import queue
import shutil
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import msgspec
import xxhash

from helexa.core.logs import quoted
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.ops.native.compilation import processor_flags, sources
from helexa.neuron.ops.native.packed_weights_cache import fingerprint, loading_code_version
from helexa.neuron.weights.gguf.mmproj import mmproj_beside

if TYPE_CHECKING:
    from helexa.neuron.engine.execution.runner import Runner

_log = logging.getLogger("helexa.neuron.engine")

_HEADER = struct.Struct("<4sIQ17s15x")  # magic, checksum of key and contents, bytes of the contents, key
_MAGIC = b"hxp4"
_NO_KEY = bytes(17)  # key of removed records
_KEY_OFFSET = struct.calcsize("<4sIQ")  # offset of the key in the header
_SEGMENT_BYTES = 64 << 20
_RESERVED_BYTES = 1 << 30  # disk space left free for other uses
_MAX_AGE_SECS = 30 * 86400  # time without use after which a segment may be deleted
_TOUCH_SECS = 60  # minimum time between two updates of a segment's modification time
_RETRY_SECS = 600  # time without writing after a disk error, because a full disk may have free space again later
_MOST_NAMES = 256
_NAME = ".segment"

MODEL_FILE = "model"  # File of a namespace that lists the ids under which its model was served

# First byte of a key: the kind of the record. The hash of the page follows. A `NAME` record has a prefix key (a
# gateway's name of a prompt) instead of the hash, and contains the hash of a page.
PAGE, STATE, WINDOW, NAME = b"p", b"s", b"w", b"n"

# Options that do not change the contents of a page.
_NEUTRAL = (
    *("device", "devices", "threads", "max_step_tokens", "max_prefill_beside_decode", "max_sequences", "max_waiting"),
    *("kv_cache_mb", "memory_limit_mb", "snapshot_mb", "prefix_reuse", "prefix_disk_mb", "speculation"),
    "model_id",
    *("speculation_max_sequences", "graphs", "overlap", "image_cache_mb", "step_timing", "draft_model"),
)


class _Record(NamedTuple):
    segment: Path
    offset: int  # offset of the contents in the segment
    length: int
    checksum: int

    def holds(self, key: bytes, contents: bytes) -> bool:
        """Return whether `contents` are exactly the bytes that were written for `key`."""
        return len(contents) == self.length and _checksum(key, [contents]) == self.checksum


def most_together(limit_bytes: int) -> int:
    """Return how many bytes of records that are written in a row surely stay on disk.

    `limit_bytes` is the limit of all segments. The start of a new segment deletes old segments, to free space for the
    whole new segment. A deleted segment may end with the first of these records.
    """
    return max(limit_bytes - _SEGMENT_BYTES, limit_bytes // 2)


class PrefixDisk:
    """The saved prompts of one model with one set of options, on disk.

    Thread-safe, but only one thread may call `write`, `clear` and `close`.

    A namespace is the folder of this model and these options, a segment is a file in the folder, and a record is one
    item in a segment, such as one KV page of a prompt.

    Args:
        folder: folder of the namespace. Its parent folder contains all namespaces.
        limit_bytes: maximum size of the segments in all namespaces.
        model: id of the model, which is stored in the folder to show whose prompts it contains.

    Raises:
        PermissionError: `folder` belongs to another user, or other users can change its files.
    """

    def __init__(self, folder: Path, limit_bytes: int, model: str = "") -> None:
        self._folder, self._limit_bytes, self._model = folder, limit_bytes, model
        self._lock = threading.Lock()
        self._index: dict[bytes, _Record] = {}
        self._touched: dict[Path, float] = {}  # when the modification time of a segment was last set
        self._segment = folder  # the segment to which `_file` writes; meaningless if `_file` is None
        self._file: BinaryIO | None = None
        self._failed: float | None = None  # time of the last failed write; None if a later write succeeded
        self.size = 0  # bytes of the known records
        with suppress(FileNotFoundError):
            state = folder.stat()
            # Users who can write these files can change the model's answers, and the owner can read the prompts.
            if state.st_uid != os.geteuid() or state.st_mode & 0o022:
                raise PermissionError(
                    f"the folder of saved prompts {folder} belongs to another user, or others can write to the folder; "
                    "delete the folder"
                )
        for segment in sorted(folder.glob(f"*{_NAME}")):
            with suppress(OSError, struct.error):  # the segment was deleted or truncated in the meantime
                records = _records(segment)
                self._index.update((key, record) for key, record in records if key != _NO_KEY)
                # An old segment without records is deleted, because its engine was killed. A new segment may belong to
                # another engine that has just begun to write.
                if not records and time.time() - segment.stat().st_mtime > _TOUCH_SECS:
                    segment.unlink()
        self.size = sum(record.length for record in self._index.values())
        if self._index:
            with suppress(OSError):  # the disk may be read-only
                self._add_model()

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def names(self) -> dict[str, bytes]:
        """Return the contents of the newest `NAME` records: page hashes by prefix key.

        A prefix key is a gateway's name of a prompt, here in hexadecimal digits.
        """
        with self._lock:
            keys = [key for key in self._index if key[:1] == NAME][-_MOST_NAMES:]
        return {key[1:9].hex(): contents for key in keys if (contents := self.read(key)) is not None}

    @property
    def writes(self) -> bool:
        """Whether records can be added: False for some minutes after an error of the disk."""
        return self._failed is None or time.monotonic() - self._failed >= _RETRY_SECS

    def read(self, key: bytes) -> bytes | None:
        """Return the contents of a record; None if it is missing or damaged."""
        record = self._index.get(key)
        if record is None:
            return None
        try:
            with record.segment.open("rb", buffering=0) as file:
                contents = os.pread(file.fileno(), record.length, record.offset)
        # Another engine has deleted the segment to free space, or a user has cleared the prompts.
        except FileNotFoundError:
            self._forget(record.segment)
            return None
        except OSError as error:
            self._pop(key)
            _log.warning(
                "saved page of a prompt not read path=%s error=%s; the page is computed again",
                quoted(record.segment),
                quoted(error.strerror or error),
            )
            return None
        if not record.holds(key, contents):
            self._remove_damaged(record.segment)
            return None
        self._touch(record.segment)
        return contents

    def write(self, key: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """Add the record `key` with joined `parts`, unless it exists or the disk fails."""
        if key in self._index:
            return
        if (record := self._append(key, parts)) is not None:
            with self._lock:
                self._index[key] = record
                self.size += record.length

    def remove(self, key: bytes) -> None:
        """Remove a record, also from its segment: zeros replace its key."""
        if (record := self._pop(key)) is not None:
            with suppress(OSError), record.segment.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), _NO_KEY, record.offset - _HEADER.size + _KEY_OFFSET)

    def _pop(self, key: bytes) -> _Record | None:
        """Remove a record from the index, and return it; None if it is not in the index."""
        with self._lock:
            record = self._index.pop(key, None)
            self.size -= 0 if record is None else record.length
        return record

    def _append(self, key: bytes, parts: Sequence[bytes | memoryview]) -> _Record | None:
        """Write a record to the current segment; return None if the disk fails."""
        if not self.writes:
            return None
        length, checksum = sum(len(part) for part in parts), _checksum(key, parts)
        try:
            file = self._file
            if file is not None and not self._segment.exists():  # what is written to a deleted file is lost
                self._forget(self._segment)
                file = None
            # Whole segments are deleted to free disk space, so segments must stay small.
            if file is None or file.tell() + length > _SEGMENT_BYTES:
                file = self._begin_segment(length)
            file.write(_HEADER.pack(_MAGIC, checksum, length, key))
            offset = file.tell()
            for part in parts:
                file.write(part)
            file.flush()
        except OSError as error:
            # A full disk fails at every page, so only the first failure is logged. Requests go on without the disk.
            if self._failed is None:
                _log.warning(
                    "prompts no longer saved to disk path=%s error=%s; free disk space, or set prefix_disk_mb to 0",
                    quoted(self._folder),
                    quoted(error.strerror or error),
                )
            self._failed = time.monotonic()
            self.close()  # the last record of the segment may be incomplete, so no other record may follow
            return None
        if self._failed is not None:
            self._failed = None
            _log.info("prompts saved to disk again path=%s", quoted(self._folder))
        return _Record(self._segment, offset, length, checksum)

    def clear(self) -> None:
        """Delete the segments of this namespace. Later records begin a new segment."""
        self.close()
        for segment in self._folder.glob(f"*{_NAME}"):
            with suppress(OSError):
                segment.unlink()
        with self._lock:
            self._index, self.size = {}, 0

    def close(self) -> None:
        """Close the segment that is being written."""
        file, self._file = self._file, None
        if file is not None:
            # On NFS, `close` may raise the error of an earlier write. The checksum shows later that the record is bad.
            with suppress(OSError):
                file.close()

    def _begin_segment(self, length: int) -> BinaryIO:
        self.close()
        self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._make_room(max(length, _SEGMENT_BYTES))
        try:
            self._file = self._create_segment()
        except FileNotFoundError:  # another engine has just deleted the last segment, and the folder with it
            self._file = self._create_segment()
        return self._file

    def _create_segment(self) -> BinaryIO:
        self._folder.mkdir(exist_ok=True, mode=0o700)
        self._add_model()
        # Names of segments sort by age. The process id separates engines that begin at the same time.
        self._segment = self._folder / f"{time.time_ns():020d}-{os.getpid()}{_NAME}"
        descriptor = os.open(self._segment, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "wb")

    def _add_model(self) -> None:
        """Add the model's id to the namespace, so that users can clear prompts by id."""
        path = self._folder / MODEL_FILE
        with path.open("a+", encoding="utf-8", errors="replace") as file:
            file.seek(0)
            # A model's file name may contain bytes that are not UTF-8, which could not be written without replacement.
            model = self._model.encode("utf-8", "replace").decode()
            if model not in file.read().splitlines():
                file.write(f"{model}\n")

    def _make_room(self, size: int) -> None:
        """Delete least recently used segments until `size` bytes fit, or raise OSError."""
        root, now = self._folder.parent, time.time()
        segments = sorted(_sizes(root))
        total = sum(bytes_ for _, bytes_, _ in segments)
        if size > self._limit_bytes:
            raise OSError(
                f"prefix_disk_mb is {self._limit_bytes >> 20}, too small for one file of {-(-size >> 20)} MiB; "
                "set a larger value"
            )
        # Other programs fill the disk: even without any segment, too little space would be free.
        if shutil.disk_usage(root).free + total < size + _RESERVED_BYTES:
            raise OSError(
                f"the disk with {root} is nearly full: {_RESERVED_BYTES >> 20} MiB must stay free beside saved prompts"
            )
        # Least recently used first (modification time, see `_touch`).
        while segments and (
            total + size > self._limit_bytes
            or shutil.disk_usage(root).free < size + _RESERVED_BYTES
            or now - segments[0][0] > _MAX_AGE_SECS
        ):
            _, bytes_, oldest = segments.pop(0)
            self._delete(oldest)
            total -= bytes_
        if shutil.disk_usage(root).free < size + _RESERVED_BYTES:
            raise OSError(
                f"the disk with {root} is nearly full: {_RESERVED_BYTES >> 20} MiB must stay free beside saved prompts"
            )

    def _delete(self, segment: Path) -> None:
        segment.unlink(missing_ok=True)
        if not any(segment.parent.glob(f"*{_NAME}")):
            models = segment.parent / MODEL_FILE
            with suppress(OSError):  # another engine has deleted the folder
                contents = models.read_bytes()
                models.unlink()
                try:
                    segment.parent.rmdir()
                except OSError:  # another engine has just begun a segment there
                    models.write_bytes(contents)
        self._forget(segment)

    def _forget(self, segment: Path) -> None:
        """Remove the records of a deleted segment from the index."""
        with self._lock:
            self._index = {key: record for key, record in self._index.items() if record.segment != segment}
            self.size = sum(record.length for record in self._index.values())

    def _remove_damaged(self, segment: Path) -> None:
        """Remove the damaged records of a segment.

        Damage often affects several records of a segment, each of which would end the read of another prompt.
        """
        with self._lock:
            suspects = {key: record for key, record in self._index.items() if record.segment == segment}
        damaged = 0
        try:
            with segment.open("rb", buffering=0) as file:
                for key, record in suspects.items():
                    if not record.holds(key, os.pread(file.fileno(), record.length, record.offset)):
                        self.remove(key)
                        damaged += 1
        except OSError:
            self._forget(segment)
        fields = (quoted(segment), damaged)
        _log.warning("saved prompts are damaged path=%s records=%d; these prompts are computed again", *fields)

    def _touch(self, segment: Path) -> None:
        """Mark a segment as used, at most once a minute."""
        now = time.monotonic()
        # A prompt reads many records of one segment.
        if now - self._touched.get(segment, -_TOUCH_SECS) >= _TOUCH_SECS:
            self._touched[segment] = now
            with suppress(OSError):
                os.utime(segment)


class ReadRecord(NamedTuple):
    """A record that was read for a sequence, or the end mark after its last record."""

    sequence_id: int | None  # None: the records were read to measure the disk
    key: bytes = b""  # empty in the end mark
    contents: bytes = b""
    pages: int = 0  # number of pages up to this record; in the end mark, up to the last record that was read


class RecordReader:
    """Reads records in a thread, and measures how fast the disk is.

    Args:
        depth: number of records that may wait in `records`.
        wants: returns whether the sequence with an id still waits for records; called in the thread.
        wake: called in the thread after each record.
    """

    def __init__(self, depth: int, wants: Callable[[int], bool], wake: Callable[[], None]) -> None:
        self.records: queue.Queue[ReadRecord] = queue.Queue(depth)
        self.bytes_per_sec = 0.0  # measured speed of the disk; 0 if unknown
        # bytes that were read for sequences, and the duration of these reads
        self.read_bytes, self.read_secs = 0, 0.0
        self._wants, self._wake = wants, wake
        self._requests: queue.SimpleQueue[tuple[int | None, list[tuple[bytes, int]]] | None] = queue.SimpleQueue()
        self._closed = threading.Event()

    def start(self, disk: PrefixDisk) -> None:
        """Start the thread, which reads from `disk`."""
        threading.Thread(target=self._run, args=(disk,), name="prefix-reader", daemon=True).start()

    def request(self, sequence_id: int | None, keys: list[tuple[bytes, int]]) -> None:
        """Queue the reads of `keys`: pairs (key, number of pages up to this record).

        The reads end at the first missing record. An end mark then follows in `records`. If `sequence_id` is None, the
        reads only measure the speed of the disk, and `records` gets only the end mark.
        """
        self._requests.put((sequence_id, keys))

    def close(self) -> None:
        """End the thread after the current read."""
        self._closed.set()
        self._requests.put(None)

    def _run(self, disk: PrefixDisk) -> None:
        while (request := self._requests.get()) is not None:
            sequence_id, keys = request
            secs, total, read = 0.0, 0, 0
            for key, pages in keys:
                if self._closed.is_set() or (sequence_id is not None and not self._wants(sequence_id)):
                    break
                begun = time.monotonic()
                contents = disk.read(key)
                secs += time.monotonic() - begun
                if contents is None:
                    break  # the pages after a gap are of no use
                total, read = total + len(contents), pages
                if sequence_id is not None:
                    self._hand_over(ReadRecord(sequence_id, key, contents, pages))
            if total:
                latest = total / max(secs, 1e-6)
                # The geometric mean, because a first read may be a thousand times slower, for example if a disk spins
                # up.
                self.bytes_per_sec = (latest * (self.bytes_per_sec or latest)) ** 0.5
                if sequence_id is not None:
                    self.read_bytes, self.read_secs = self.read_bytes + total, self.read_secs + secs
            self._hand_over(ReadRecord(sequence_id, pages=read))

    def _hand_over(self, record: ReadRecord) -> None:
        while not self._closed.is_set():
            with suppress(queue.Full):
                self.records.put(record, timeout=1.0)
                self._wake()
                return


def _records(segment: Path) -> list[tuple[bytes, _Record]]:
    """Return the keys and records of a segment, up to the first incomplete record."""
    records: list[tuple[bytes, _Record]] = []
    with segment.open("rb", buffering=0) as file:
        size, offset = os.fstat(file.fileno()).st_size, 0
        while offset + _HEADER.size <= size:
            magic, checksum, length, key = _HEADER.unpack(os.pread(file.fileno(), _HEADER.size, offset))
            offset += _HEADER.size
            # The engine was killed while it wrote this record, so no record follows.
            if magic != _MAGIC or length > size - offset:
                break
            records.append((key, _Record(segment, offset, length, checksum)))
            offset += length
    return records


def _checksum(key: bytes, parts: Sequence[bytes | memoryview]) -> int:
    # xxHash is used, because `zlib.crc32` would take longer than reading the record from the page cache.
    checksum = xxhash.xxh3_64(key)
    for part in parts:
        checksum.update(part)
    return checksum.intdigest() & 0xFFFFFFFF


def _sizes(root: Path) -> list[tuple[float, int, Path]]:
    """Return time of last use, size and path of all segments in all namespaces."""
    found: list[tuple[float, int, Path]] = []
    for path in root.glob(f"*/*{_NAME}"):
        with suppress(OSError):  # another engine has deleted the segment, which on NFS raises ESTALE
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    return found


def namespace(model: Path, options: EngineOptions, runner: "Runner") -> str:
    """Return a digest of all files and settings that change the contents of a page."""
    digest = hashlib.sha256(fingerprint(model).encode())
    tower = Path(options.mmproj) if options.mmproj else mmproj_beside(model)
    if options.images and tower is not None:
        digest.update(fingerprint(tower).encode())
    digest.update(loading_code_version().encode())
    for path in sources():
        digest.update(path.read_bytes())
    layout = [runner.page_parts, runner.window_parts, runner.state_parts]
    chosen = {name: value for name, value in msgspec.structs.asdict(options).items() if name not in _NEUTRAL}
    digest.update(msgspec.json.encode([runner.ops.name, sorted(processor_flags()), runner.ops.kv_bits, layout, chosen]))
    return digest.hexdigest()[:40]
