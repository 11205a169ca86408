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
from contextlib import ExitStack, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from helexa.core.errors import HelexaError
from helexa.cortex.ledger import entries
from helexa.cortex.ledger.database import Args, Database, DatabaseError, Step

log = logging.getLogger(__name__)

_CATCH_UP = "UPDATE gateways SET batch = $2 WHERE id = $1 AND batch < $2"
_SPENT = (
    "UPDATE leases SET spent = CASE WHEN spent < $4 THEN $4 ELSE spent END "
    "WHERE key_id = $1 AND window_id = $2 AND gateway = $3"
)
_KINDS = (entries.OPENED, entries.CLOSED)
_SUFFIXES = (".journal.0", ".journal.1")


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

    @property
    def whole(self) -> bool:
        """Whether all lines so far were added, or are in the database."""
        return self._lacks is None

    def turn(self, gateway: int, batch: int) -> None:
        """What follows belongs to this batch; the one before is being written."""
        self._files.reverse()
        self._batch = batch
        self._head = orjson.dumps([gateway, batch]) + b"\n"

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
    def __init__(self, path: Path, opened: ExitStack) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        opened.callback(self._close, path)
        self._broken = False  # there is more in it than `size` says
        self.size = 0
        os.ftruncate(self._descriptor, 0)

    def add(self, lines: bytes) -> bool:
        if self._broken:
            return False
        try:
            if os.write(self._descriptor, lines) != len(lines):
                raise OSError("the disk is full")
        except OSError as error:
            log.error("the ledger's journal cannot be written (%s); requests wait for the database", error)
            try:
                os.ftruncate(self._descriptor, self.size)
            except OSError:
                self._broken = True
            return False
        self.size += len(lines)
        return True

    def empty(self) -> None:
        if not (self.size or self._broken):
            return
        try:
            os.ftruncate(self._descriptor, 0)
        except OSError as error:
            self._broken = True  # its lines belong to a batch that is written
            log.error("the ledger's journal cannot be emptied (%s); requests wait for the database", error)
        else:
            self.size, self._broken = 0, False

    def _close(self, path: Path) -> None:
        os.close(self._descriptor)
        if not (self.size or self._broken):
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
