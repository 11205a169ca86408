"""What a gateway has promised and its database does not know yet: lines in a file, each there before anyone is told.

A line costs a twentieth of a transaction. It is for a database that is one gateway's alone, since no other could see
it, and it is as durable as the database's own log: against the death of the process, not against a power failure.

Two files are written in turns. The lines of one belong to the batch that is gathered now; when that is made, what comes
meanwhile goes into the other, and once the batch is in the database its file is emptied. A file begins with the batch
it belongs to, so whoever finds it later knows whether the database has it.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from helexa.cortex.ledger import entries
from helexa.cortex.ledger.database import Args, Database, Step

log = logging.getLogger(__name__)

_CATCH_UP = "UPDATE gateways SET batch = $2 WHERE id = $1 AND batch < $2"
_SPENT = (
    "UPDATE leases SET spent = CASE WHEN spent < $4 THEN $4 ELSE spent END "
    "WHERE key_id = $1 AND window_id = $2 AND gateway = $3"
)
_SUFFIXES = (".journal.0", ".journal.1")


class Journal:
    """The journal of the one gateway at work on a database."""

    def __init__(self, database: Path) -> None:
        """Open the files beside the database's, for their owner alone; what they hold stays.

        Raises:
            OSError: they cannot be opened.
        """
        self._files = [_File(path) for path in _paths(database)]
        self._head = b""

    def turn(self, gateway: int, batch: int) -> None:
        """What follows belongs to this batch; the one before is being written."""
        self._files.reverse()
        self._head = orjson.dumps([gateway, batch]) + b"\n"

    def add(self, record: entries.Record) -> bool:
        """Add a line; False, with nothing added, if the disk takes none."""
        file = self._files[0]
        line = orjson.dumps(record) + b"\n"
        return file.add(line if file.size else self._head + line)

    def written(self) -> None:
        """The batch before the current one is in the database."""
        self._files[1].empty()

    def close(self) -> None:
        """Close the files; without a line in them they go."""
        for file in self._files:
            file.close()


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.size = os.fstat(self._descriptor).st_size
        self._broken = False  # what it holds belongs to a batch that is written, and cannot be got rid of

    def add(self, lines: bytes) -> bool:
        if self._broken:
            return False
        try:
            if os.write(self._descriptor, lines) != len(lines):
                raise OSError("the disk is full")
        except OSError as error:
            log.error("the ledger's journal cannot be written (%s); the database is asked for each request", error)
            with suppress(OSError):  # half a line at the end would be passed over
                os.ftruncate(self._descriptor, self.size)
            return False
        self.size += len(lines)
        return True

    def empty(self) -> None:
        if self.size:
            try:
                os.ftruncate(self._descriptor, 0)
            except OSError as error:
                self._broken = True
                log.error("the ledger's journal cannot be emptied (%s); the database is asked for each request", error)
            else:
                self.size = 0

    def close(self) -> None:
        os.close(self._descriptor)
        if not self.size:
            self._path.unlink(missing_ok=True)


async def catch_up(path: Path, database: Database) -> None:
    """Bring a database up to what its journal says; nothing changes if it knows all of it.

    Args:
        path: the database's file.
        database: the same, opened, and this gateway's alone.

    Raises:
        DatabaseError: the database does not answer.
    """
    found = [one for one in map(_read, _paths(path)) if one is not None]
    for gateway, batch, lines in sorted(found, key=itemgetter(0, 1)):
        if await database.write((_CATCH_UP, (gateway, batch)), list(_steps(gateway, lines))):
            log.info("%d lines of the journal of gateway %d were not in the ledger yet", len(lines), gateway)
    for file in _paths(path):
        with suppress(FileNotFoundError):
            os.truncate(file, 0)


def _paths(database: Path) -> list[Path]:
    return [database.with_name(database.name + suffix) for suffix in _SUFFIXES]


def _read(path: Path) -> tuple[int, int, list[Any]] | None:
    """Gateway, batch and lines of a file, None for an empty one. A line that a power failure tore ends it."""
    try:
        lines = path.read_bytes().split(b"\n")
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
    (gateway, batch), *rest = records
    return gateway, batch, rest


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
