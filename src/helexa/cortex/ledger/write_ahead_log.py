"""Write-ahead log of one gateway: records of granted and closed reservations that the database does not have yet.

A request is answered only after its record is in the log. Adding a record costs far less than a transaction. The log
exists only for a database that a single gateway uses, because other gateways cannot read it. The log is as durable as
the database's own log: it survives the death of the process, but not a power failure.

The log files are memory-mapped. A write system call would release the GIL, and reacquiring the GIL from the thread that
writes to the database costs more than the rest of adding a record. The first byte of a line is written last, so a line
is in the file once its first byte is nonzero. A zero byte ends the lines.

Two files alternate. The current file holds the records of the batch that is being gathered. When the batch is made,
later records go into the other file, and once the batch is in the database, its file is emptied. Each file begins with
the number of its batch, so that a later gateway knows whether the database already has it.
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
from helexa.cortex.ledger import entries
from helexa.cortex.ledger.storage.database import Args, Database, DatabaseError, Step

log = logging.getLogger(__name__)

_CATCH_UP = "UPDATE gateways SET batch = $2 WHERE id = $1 AND batch < $2"
_SPENT = (
    "UPDATE leases SET spent = CASE WHEN spent < $4 THEN $4 ELSE spent END "
    "WHERE key_id = $1 AND window_id = $2 AND gateway = $3"
)
_KINDS = (entries.OPENED, entries.CLOSED)
_SUFFIXES = (".journal.0", ".journal.1")
_BLOCK_BYTES = 1 << 20  # growth of a file; a file never shrinks while the gateway runs
# Some file systems allocate mapped pages only on write, and kill the process with a signal if the disk is full.
_LEAST_FREE_BYTES = 64 << 20


class WriteAheadLog:
    """The write-ahead log of the only gateway on a database.

    Records depend on earlier records. After a record could not be added, the log therefore rejects all records until
    the batch with the missing record is in the database.
    """

    def __init__(self, database: Path) -> None:
        """Open the log files next to the database file, readable by the owner only.

        The files must be empty; `catch_up` empties them.

        Raises:
            OSError: a file cannot be opened.
        """
        with ExitStack() as opened:
            self._files = [_File(path, opened) for path in _paths(database)]
            self._opened = opened.pop_all()
        self._head = b""
        self._batch = 0
        self._lacks: int | None = None  # a batch with records that the log lacks
        self._tight = False

    @property
    def whole(self) -> bool:
        """Whether no record is missing: each was added or is in the database."""
        return self._lacks is None

    def turn(self, gateway: int, batch: int) -> None:
        """Start the records of a new batch; the previous batch is being written to the database."""
        self._files.reverse()
        self._batch = batch
        self._head = orjson.dumps([gateway, batch]) + b"\n"
        nearly_full = self._files[0].free() < _LEAST_FREE_BYTES
        if nearly_full:
            self._lacks = batch
        if nearly_full != self._tight:
            self._tight = nearly_full
            log.warning(
                "the ledger's disk %s", "is nearly full; requests wait for the database" if nearly_full else "has room"
            )

    def add(self, record: entries.Record) -> bool:
        """Add a record. Return False if the disk is full or the log already lacks a record."""
        if self._lacks is None:
            file = self._files[0]
            line = orjson.dumps(record) + b"\n"
            if file.add(line if file.size else self._head + line):
                return True
        self._lacks = self._batch
        return False

    def written(self) -> None:
        """Empty the file of the previous batch, which is in the database."""
        self._files[1].empty()
        if self._lacks is not None and self._lacks < self._batch:
            self._lacks = None

    def close(self) -> None:
        """Close the files, and delete files without records."""
        self._opened.close()


class _File:
    """Lines in a memory-mapped file.

    Attributes:
        size: number of bytes of the lines.
    """

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        opened.callback(self._close, path)
        os.ftruncate(self._descriptor, 0)
        self.size = 0
        self._room = 0
        self._map: mmap.mmap | None = None
        self._grow(_BLOCK_BYTES)

    def add(self, lines: bytes) -> bool:
        """Add lines. Return False if the file has to grow and the disk is full."""
        start, end = self.size, self.size + len(lines)
        if end >= self._room:
            try:
                self._grow(end + 1)
            except OSError as error:
                log.error("the ledger's journal cannot grow (%s); requests wait for the database", error)
                return False
        assert self._map is not None
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
        """Return the free bytes of the file system."""
        disk = os.fstatvfs(self._descriptor)
        return disk.f_bavail * disk.f_frsize

    def _grow(self, least: int) -> None:
        """Allocate at least `least` bytes on the disk and map them.

        Raises:
            OSError: the disk is full.
        """
        capacity = -(-least // _BLOCK_BYTES) * _BLOCK_BYTES
        size = self._room
        while size < capacity:
            size += os.pwrite(self._descriptor, bytes(capacity - size), size)
        new_map = mmap.mmap(self._descriptor, capacity)
        if self._map is not None:
            self._map.close()
        self._map, self._room = new_map, capacity

    def _close(self, path: Path) -> None:
        if self._map is not None:
            self._map.close()
        os.close(self._descriptor)
        if not self.size:
            path.unlink(missing_ok=True)


async def catch_up(path: Path, database: Database) -> None:
    """Apply the records of the write-ahead log that a database lacks.

    Args:
        path: the database's file.
        database: the opened database, which only this gateway uses.

    Raises:
        DatabaseError: the database does not answer, or the log cannot be read.
        HelexaError: a newer version of helexa wrote the log.
    """
    try:
        journals = [journal for journal in map(_read, _paths(path)) if journal is not None]
        for gateway, batch, lines in sorted(journals, key=itemgetter(0, 1)):
            if await database.write((_CATCH_UP, (gateway, batch)), list(_steps(gateway, lines))):
                log.info("%d lines of the journal of gateway %d were not in the ledger yet", len(lines), gateway)
            elif not await database.fetch("SELECT id FROM gateways WHERE id = $1", gateway):
                log.error("%d lines of a journal are left out: gateway %d has left the ledger", len(lines), gateway)
        for file in _paths(path):
            with suppress(FileNotFoundError):
                os.truncate(file, 0)
    except OSError as error:
        raise DatabaseError(f"the journal beside {path} cannot be read: {error.strerror}") from error


def _paths(database: Path) -> list[Path]:
    return [database.with_name(database.name + suffix) for suffix in _SUFFIXES]


def _read(path: Path) -> tuple[int, int, list[Any]] | None:
    """Return gateway id, batch number and records of a file, or None for an empty file.

    A line that a power failure left incomplete ends the records.
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
            log.warning("a line of the ledger's journal is torn; it and what follows are left out")
            break
    if not records:
        return None
    match records:
        case [[int(gateway), int(batch)], *entry_lines] if all(line[0] in _KINDS for line in entry_lines):
            return gateway, batch, entry_lines
    raise HelexaError(f"{path} is no journal that this helexa can read; start the one that wrote it, and stop it")


def _steps(gateway: int, lines: list[Any]) -> Iterator[Step]:
    opened = [entries.opening(gateway, *values) for kind, *values in lines if kind == entries.OPENED]
    closed_rows: list[Args] = []
    spent_by_lease: dict[tuple[str, int], int] = {}
    for kind, *values in lines:
        if kind == entries.CLOSED:
            seq, key_id, window_id, tokens, *columns = values
            closed_rows.append((gateway, seq, *columns))
            spent_by_lease[key_id, window_id] = tokens
    yield entries.ADD + " ON CONFLICT DO NOTHING", opened
    yield entries.CLOSE, closed_rows
    yield _SPENT, [(*lease, gateway, tokens) for lease, tokens in spent_by_lease.items()]
