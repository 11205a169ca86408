"""What a gateway has promised and its database does not know yet: lines in a file, each there before anyone is told.

A line costs far less than a transaction. It is for a database that is one gateway's alone, since no other could see
it, and it is as durable as the database's own log: against the death of the process, not against a power failure.

The files are mapped into memory: to write to them would let go of the interpreter, and to get that back from the thread
that writes the database costs more than all the rest of a line. A line is in a file as soon as its first byte is, which
is set last; the lines end before a zero byte.

Two files are written in turns. The lines of one belong to the batch that is gathered now; when that is made, what comes
meanwhile goes into the other, and once the batch is in the database its file is emptied. A file begins with the batch
it belongs to, so whoever finds it later knows whether the database has it.
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
_BLOCK_BYTES = 1 << 20  # by which a file grows; none shrinks while it is at work
# Some file systems find a place for a page only after it was written to in memory, and end who wrote if there is none.
_LEAST_FREE_BYTES = 64 << 20


class Journal:
    """The journal of the one gateway at work on a database.

    Lines build on those before them. Once one could not be added, none is until the batch that has it is written.
    """

    def __init__(self, database: Path) -> None:
        """Open the files beside the database's, for their owner alone. They must be empty, see `catch_up`.

        Raises:
            OSError: they cannot be opened.
        """
        with ExitStack() as opened:
            self._files = [_File(path, opened) for path in _paths(database)]
            self._opened = opened.pop_all()
        self._head = b""
        self._batch = 0
        self._lacks: int | None = None  # a batch that has what is not in the journal
        self._tight = False

    @property
    def whole(self) -> bool:
        """Whether all lines so far were added, or are in the database."""
        return self._lacks is None

    def turn(self, gateway: int, batch: int) -> None:
        """What follows belongs to this batch; the one before is being written."""
        self._files.reverse()
        self._batch = batch
        self._head = orjson.dumps([gateway, batch]) + b"\n"
        tight = self._files[0].free() < _LEAST_FREE_BYTES
        if tight:
            self._lacks = batch
        if tight != self._tight:
            self._tight = tight
            log.warning(
                "the ledger's disk %s", "is nearly full; requests wait for the database" if tight else "has room"
            )

    def add(self, record: entries.Record) -> bool:
        """Add a line; False if the disk does not take it, or did not take one before it."""
        if self._lacks is None:
            file = self._files[0]
            line = orjson.dumps(record) + b"\n"
            if file.add(line if file.size else self._head + line):
                return True
        self._lacks = self._batch
        return False

    def written(self) -> None:
        """The batch before the current one is in the database."""
        self._files[1].empty()
        if self._lacks is not None and self._lacks < self._batch:
            self._lacks = None

    def close(self) -> None:
        """Close the files; without a line in them they go."""
        self._opened.close()


class _File:
    """Lines in a mapped file.

    Attributes:
        size: their bytes.
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
        """Add lines; False if they do not fit and the disk has no room for more."""
        begin, end = self.size, self.size + len(lines)
        if end >= self._room:
            try:
                self._grow(end + 1)
            except OSError as error:
                log.error("the ledger's journal cannot grow (%s); requests wait for the database", error)
                return False
        assert self._map is not None
        self._map[begin + 1 : end + 1] = lines[1:] + b"\0"
        self._map[begin] = lines[0]
        self.size = end
        return True

    def empty(self) -> None:
        """Have no lines."""
        if self.size:
            assert self._map is not None
            self._map[0] = self.size = 0

    def free(self) -> int:
        """Bytes that its file system has left."""
        found = os.fstatvfs(self._descriptor)
        return found.f_bavail * found.f_frsize

    def _grow(self, least: int) -> None:
        """Have room for this many bytes, all of them on the disk.

        Raises:
            OSError: there is none.
        """
        room = -(-least // _BLOCK_BYTES) * _BLOCK_BYTES
        size = self._room
        while size < room:
            size += os.pwrite(self._descriptor, bytes(room - size), size)
        grown = mmap.mmap(self._descriptor, room)
        if self._map is not None:
            self._map.close()
        self._map, self._room = grown, room

    def _close(self, path: Path) -> None:
        if self._map is not None:
            self._map.close()
        os.close(self._descriptor)
        if not self.size:
            path.unlink(missing_ok=True)


async def catch_up(path: Path, database: Database) -> None:
    """Bring a database up to what its journal says; nothing changes if it knows all of it.

    Args:
        path: the database's file.
        database: the same, opened, and this gateway's alone.

    Raises:
        DatabaseError: the database does not answer, or the journal cannot be read.
        HelexaError: a newer helexa wrote the journal.
    """
    try:
        found = [one for one in map(_read, _paths(path)) if one is not None]
        for gateway, batch, lines in sorted(found, key=itemgetter(0, 1)):
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
    """Gateway, batch and lines of a file, None for an empty one. A line that a power failure tore ends it."""
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
        case [[int(gateway), int(batch)], *rest] if all(line[0] in _KINDS for line in rest):
            return gateway, batch, rest
    raise HelexaError(f"{path} is no journal that this helexa can read; start the one that wrote it, and stop it")


def _steps(gateway: int, lines: list[Any]) -> Iterator[Step]:
    opened = [entries.opening(gateway, *values) for kind, *values in lines if kind == entries.OPENED]
    closed: list[Args] = []
    spent: dict[tuple[str, int], int] = {}
    for kind, *values in lines:
        if kind == entries.CLOSED:
            seq, key_id, window_id, tokens, *columns = values
            closed.append((gateway, seq, *columns))
            spent[key_id, window_id] = tokens
    yield entries.ADD + " ON CONFLICT DO NOTHING", opened
    yield entries.CLOSE, closed
    yield _SPENT, [(*lease, gateway, tokens) for lease, tokens in spent.items()]
