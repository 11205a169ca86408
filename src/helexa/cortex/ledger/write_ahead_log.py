"""Log of the reservations and charges that the database does not have yet.

A reservation is granted only after its record is in the log or in the database. Adding a record to the log costs far
less than a transaction. The log is used only if a single gateway uses the database, because other gateways cannot read
the log. The log is as durable as the database's own log: records survive a crash of the process, but not a power
failure.

The log files are memory-mapped, because a write system call would release the GIL. Reacquiring the GIL from the thread
that writes to the database takes longer than all other work of adding a record. Each record is one line. The first byte
of a line is written last, so a line is complete once its first byte is nonzero. A zero byte follows the last line.

Two files alternate. The current file holds the records of the batch that is being gathered. When the database starts to
write this batch, new records go into the other file. Once the batch is in the database, its file is emptied. Each file
begins with the number of its batch, so that the gateway can tell at its next start whether the database already has the
batch.
"""

import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from helexa.core.errors import HelexaError
from helexa.core.logs import quoted
from helexa.cortex.ledger.reservations_in_memory import ADD_ENTRY, CLOSE_ENTRY, CLOSED, OPENED, Record, opening
from helexa.cortex.ledger.storage.database import Args, Database, DatabaseError, Step

log = logging.getLogger(__name__)

_CATCH_UP = "UPDATE gateways SET batch = $2 WHERE id = $1 AND batch < $2"
_SPENT = (
    "UPDATE leases SET spent = CASE WHEN spent < $4 THEN $4 ELSE spent END "
    "WHERE key_id = $1 AND window_id = $2 AND gateway = $3"
)
_RECORD_KINDS = (OPENED, CLOSED)
_SUFFIXES = (".journal.0", ".journal.1")
_GROWTH_BYTES = 1 << 20  # growth of a file; a file never shrinks while the gateway runs
# With less free space on the disk, the log accepts no records. Some file systems allocate a mapped page only when it is
# written, and end the process with a signal if the disk is then full.
_MIN_FREE_BYTES = 64 << 20


class WriteAheadLog:
    """The write-ahead log of a gateway that does not share its database."""

    # A record may depend on earlier records. After a record that could not be added, the log therefore rejects all
    # later records, until the database has the batch with the missing record.
    def __init__(self, database: Path) -> None:
        """Open the log files next to the database file, readable by the owner only.

        This deletes all records in the files. The caller must first write the records to the database with `catch_up`.
        """
        with ExitStack() as opened:
            self._files = [_File(path, opened) for path in _paths(database)]
            self._opened = opened.pop_all()
        self._header = b""
        self._batch = 0
        self._incomplete_batch: int | None = (
            None  # number of a batch of which the log lacks a record; None if it lacks none
        )
        self._disk_nearly_full = False

    @property
    def complete(self) -> bool:
        """True if no record is missing in the log. If False, `add` rejects all records."""
        return self._incomplete_batch is None

    def start_batch(self, gateway: int, batch: int) -> None:
        """Switch to the other log file: all later records belong to the batch `batch`.

        Call this before the first `add`, and then only after `written`, because the other file must be empty. The file
        of the previous batch is kept until `written` is called. If the disk is nearly full, the log rejects the records
        of the new batch.
        """
        # There are two files because records of this batch may arrive before the database has the previous batch.
        self._files.reverse()
        self._batch = batch
        self._header = orjson.dumps([gateway, batch]) + b"\n"
        nearly_full = self._files[0].free() < _MIN_FREE_BYTES
        if nearly_full:
            self._incomplete_batch = batch
        if nearly_full != self._disk_nearly_full:
            self._disk_nearly_full = nearly_full
            log.warning(
                "ledger's disk is nearly full, so each request waits for the database; free some space"
                if nearly_full
                else "ledger's disk has enough free space again"
            )

    def add(self, record: Record) -> bool:
        """Add a record; return False if the disk is full, or an earlier record is missing."""
        if self._incomplete_batch is None:
            file = self._files[0]
            line = orjson.dumps(record) + b"\n"
            if file.add(line if file.size else self._header + line):
                return True
        self._incomplete_batch = self._batch
        return False

    def written(self) -> None:
        """Empty the file of the previous batch, which the database has now."""
        self._files[1].empty()
        if self._incomplete_batch is not None and self._incomplete_batch < self._batch:
            self._incomplete_batch = None

    def close(self) -> None:
        """Close the files, and delete files without records."""
        self._opened.close()


class _File:
    """A memory-mapped file to which lines are appended."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        opened.callback(self._close, path)
        os.ftruncate(self._descriptor, 0)
        self.size = 0  # total length of the lines in bytes
        self._capacity = 0
        self._map: mmap.mmap | None = None
        self._grow(_GROWTH_BYTES)

    def add(self, lines: bytes) -> bool:
        """Append lines; return False if the file has no room and the disk is full."""
        start, end = self.size, self.size + len(lines)
        if end >= self._capacity:
            try:
                self._grow(end + 1)
            except OSError as error:
                log.error(
                    "write-ahead log cannot grow error=%s; requests wait for the database until disk space is free",
                    quoted(error),
                )
                return False
        assert self._map is not None
        # `_read` stops at the first NUL byte. The first byte of `lines` is written last, so that after a crash during
        # this write, `_read` finds either all of `lines` or nothing of them.
        self._map[start + 1 : end + 1] = lines[1:] + b"\0"
        self._map[start] = lines[0]
        self.size = end
        return True

    def empty(self) -> None:
        """Delete all lines."""
        if self.size:
            assert self._map is not None
            self._map[0] = self.size = 0

    def free(self) -> int:
        """Return the number of free bytes of the file system that contains the file."""
        disk = os.fstatvfs(self._descriptor)
        return disk.f_bavail * disk.f_frsize

    def _grow(self, min_bytes: int) -> None:
        """Grow the file to at least `min_bytes` bytes on the disk, and map the whole file."""
        capacity = -(-min_bytes // _GROWTH_BYTES) * _GROWTH_BYTES
        size = self._capacity
        # Write zeros, so that the file system allocates the blocks now. If the file were only extended with a hole, a
        # later write to a mapped page of the hole would end the process with SIGBUS if the disk is full.
        while size < capacity:
            size += os.pwrite(self._descriptor, bytes(capacity - size), size)
        new_map = mmap.mmap(self._descriptor, capacity)
        if self._map is not None:
            self._map.close()
        self._map, self._capacity = new_map, capacity

    def _close(self, path: Path) -> None:
        if self._map is not None:
            self._map.close()
        os.close(self._descriptor)
        if not self.size:
            path.unlink(missing_ok=True)


async def catch_up(path: Path, database: Database) -> None:
    """Write the log's records to the database, and empty the log files.

    Records of a gateway that was already retired are dropped. No `WriteAheadLog` may be open.

    Args:
        path: the database file, next to which the log files are.
        database: the opened database, which only this gateway uses.

    Raises:
        DatabaseError: the database does not answer, or the log cannot be read.
        HelexaError: a newer version of helexa wrote the log.
    """
    try:
        logs = [file_records for file_records in map(_read, _paths(path)) if file_records is not None]
        # If both files have records, the records of the older batch are written first.
        for gateway, batch, lines in sorted(logs, key=itemgetter(0, 1)):
            if await database.write((_CATCH_UP, (gateway, batch)), list(_steps(gateway, lines))):
                log.info("write-ahead log written to the database gateway=%d records=%d", gateway, len(lines))
            elif not await database.fetch("SELECT id FROM gateways WHERE id = $1", gateway):
                log.error(
                    "write-ahead log dropped gateway=%d records=%d; the gateway's open reservations were already "
                    "charged in full",
                    *(gateway, len(lines)),
                )
        for file in _paths(path):
            with suppress(FileNotFoundError):
                os.truncate(file, 0)
    except OSError as error:
        raise DatabaseError(
            f"cannot read the write-ahead log {path}.journal.0 or .1: {error.strerror}; "
            "check the permissions of both files"
        ) from error


def _paths(database: Path) -> list[Path]:
    return [database.with_name(database.name + suffix) for suffix in _SUFFIXES]


def _read(path: Path) -> tuple[int, int, list[Any]] | None:
    """Return gateway, batch and records of a log file, or None if it has no records.

    Records after an incomplete line, which a power failure can leave, are ignored.
    """
    try:
        lines = path.read_bytes().partition(b"\0")[0].split(b"\n")
    except FileNotFoundError:
        return None
    records: list[Any] = []
    for line in lines[:-1]:
        try:
            records.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            log.warning(
                "write-ahead log has an incomplete line path=%s; this line and the following ones are ignored",
                quoted(path),
            )
            break
    if not records:
        return None
    match records:
        case [[int(gateway), int(batch)], *entry_records] if all(
            record[0] in _RECORD_KINDS for record in entry_records
        ):
            return gateway, batch, entry_records
    raise HelexaError(
        f"{path} is not a write-ahead log of this helexa version; start and stop the helexa version that wrote it, "
        "which moves its records to the database"
    )


def _steps(gateway: int, lines: list[Any]) -> Iterator[Step]:
    opened = [opening(gateway, *values) for kind, *values in lines if kind == OPENED]
    closed_rows: list[Args] = []
    spent_by_lease: dict[tuple[str, int], int] = {}
    for kind, *values in lines:
        if kind == CLOSED:
            seq, key_id, window_id, tokens, *columns = values
            closed_rows.append((gateway, seq, *columns))
            # each record has the lease's total of spent tokens so far, so the last record replaces the earlier ones
            spent_by_lease[key_id, window_id] = tokens
    # A row that the database already has is not an error.
    yield ADD_ENTRY + " ON CONFLICT DO NOTHING", opened
    yield CLOSE_ENTRY, closed_rows
    yield _SPENT, [(*lease, gateway, tokens) for lease, tokens in spent_by_lease.items()]
