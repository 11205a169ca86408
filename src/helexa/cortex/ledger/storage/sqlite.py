"""SQLite backend of the ledger, with one thread for writes and one for reads.

Ordinary commits do not wait for the disk (`synchronous = NORMAL`), so a power failure may undo the last commits. Only
the commit of a transaction with `durable=True` waits for the disk (`synchronous = FULL`).
"""

import asyncio
import fcntl
import os
import queue
import re
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from helexa.core.errors import HelexaError
from helexa.cortex.ledger.storage.database import Args, Database, DatabaseError, Row, Sql, Step

_NORMAL, _FULL = "PRAGMA synchronous = NORMAL", "PRAGMA synchronous = FULL"
_BUSY_TIMEOUT_SECS = 5.0
_ROWS_PER_INSERT = (128, 32, 6)
_INSERT = re.compile(r"(INSERT INTO .* VALUES )\(([$\d, ]+)\)((?: ON CONFLICT .*)?)")
_PARAMETER = re.compile(r"\$(\d+)")
# Errors of one statement or of its values; the database stays usable.
_STATEMENT_ERRORS = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.DataError, sqlite3.InterfaceError)
_TRANSIENT_ERRORS = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)  # the connection stays usable
T = TypeVar("T")
_Job = tuple[Callable[[sqlite3.Connection], Any], asyncio.Future[Any]]


async def open_sqlite(path: str) -> Database:
    """Open a SQLite database file, created if missing, readable by its owner only.

    Raises:
        DatabaseError: the file cannot be opened.
    """
    file = _create_file(path)
    writer = _Worker(
        file,
        "PRAGMA page_size = 1024",  # affects new files only; a commit writes whole pages, so small pages cost less
        "PRAGMA journal_mode = WAL",
        _NORMAL,
        "PRAGMA foreign_keys = ON",
    )
    reader = _Worker(file, "PRAGMA query_only = ON")
    database = _Sqlite(file, writer, reader)
    try:
        await writer.run(lambda connection: None)
        await reader.run(lambda connection: None)
    except BaseException:
        await database.close()
        raise
    return database


def _create_file(path: str) -> Path:
    # Resolve symbolic links, so that the lock file and the write-ahead log are next to the real file.
    file = Path(path).resolve()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise DatabaseError(
            f"cannot open the ledger {file}: {error.strerror}; check ledger.url and the permissions of {file.parent}"
        ) from error
    return file


class _Worker:
    """A thread that owns one SQLite connection, and runs jobs with it in order.

    After an error that can leave the connection unusable (I/O, corruption), the next job gets a new connection.
    """

    def __init__(self, file: Path, *pragmas: str) -> None:
        self._file, self._pragmas = file, pragmas
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="ledger", daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Run a job and return its result.

        The job completes even if the caller is cancelled.

        Raises:
            DatabaseError: SQLite cannot use the database. An error of the job's own SQL is raised as `sqlite3.Error`.
        """
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((job, future))
        try:
            return await future
        except sqlite3.Error as error:
            if _is_statement_error(error):
                raise
            raise DatabaseError(
                f"the ledger {self._file} cannot be used: {error}; check the disk and the file"
            ) from error

    async def close(self) -> None:
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        connection: sqlite3.Connection | None = None
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            try:
                connection = connection or self._connect()
                outcome = job(connection)
            except Exception as error:
                if connection is not None and isinstance(error, sqlite3.Error) and _spoils_connection(error):
                    with suppress(sqlite3.Error):
                        connection.close()
                    connection = None
                self._loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._loop.call_soon_threadsafe(_resolve, future, outcome)
        if connection is not None:
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._file, timeout=_BUSY_TIMEOUT_SECS, isolation_level=None)
        connection.row_factory = sqlite3.Row
        try:
            for pragma in self._pragmas:
                connection.execute(pragma)
        except sqlite3.Error:
            connection.close()
            raise
        return connection


class _Sqlite(Database):
    def __init__(self, file: Path, writer: _Worker, reader: _Worker) -> None:
        super().__init__(f"move the files {file}* away")
        self._file, self._writer, self._reader = file, writer, reader
        self._write_lock = asyncio.Lock()  # held by the open transaction
        self._lock_descriptor: int | None = None

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        return await self._reader.run(lambda connection: _fetch(connection, sql, args))

    async def execute(self, sql: str, *args: Any) -> int:
        async with self._write_lock:
            return await self._writer.run(lambda connection: _execute(connection, sql, args))

    def transaction(self, *, durable: bool = False) -> AbstractAsyncContextManager[Sql]:
        return self._transaction(durable)

    @asynccontextmanager
    async def _transaction(self, durable: bool) -> AsyncIterator[Sql]:
        async with self._write_lock:
            try:
                await self._writer.run(lambda connection: _begin(connection, durable))
                yield _Transaction(self._writer)
                await self._writer.run(_commit)
            except BaseException:
                # The thread runs jobs in order, so the rollback runs after any pending job. After a commit, a rollback
                # has no effect.
                await asyncio.shield(self._writer.run(_roll_back))
                raise

    async def write(self, guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
        async with self._write_lock:
            return await self._writer.run(lambda connection: _write(connection, guard, steps))

    async def claim(self) -> Path:
        # Use a separate lock file: closing any descriptor of the database file would drop SQLite's locks on it.
        lock = os.open(f"{self._file}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise HelexaError(
                f"another gateway uses the ledger {self._file}; stop that gateway, or set ledger.url of both gateways "
                "to one PostgreSQL database"
            ) from error
        except OSError as error:  # without a lock, two gateways could spend the same budget twice
            os.close(lock)
            raise HelexaError(
                f"the ledger {self._file} cannot be locked: {error.strerror}; move the ledger to a file "
                "system with file locks"
            ) from error
        self._lock_descriptor = lock
        return self._file

    async def close(self) -> None:
        await self._reader.close()
        await self._writer.close()
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def _dialect(self, statement: str) -> str:
        return statement

    async def _lock_schema(self, sql: Sql) -> None:
        """Do nothing, because SQLite allows only one writing transaction at a time."""


class _Transaction(Sql):
    def __init__(self, writer: _Worker) -> None:
        self._writer = writer

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        return await self._writer.run(lambda connection: _fetch(connection, sql, args))

    async def execute(self, sql: str, *args: Any) -> int:
        return await self._writer.run(lambda connection: _execute(connection, sql, args))


def _is_statement_error(error: sqlite3.Error) -> bool:
    return isinstance(error, _STATEMENT_ERRORS) or _result_code(error) == sqlite3.SQLITE_ERROR


def _spoils_connection(error: sqlite3.Error) -> bool:
    return not _is_statement_error(error) and _result_code(error) not in _TRANSIENT_ERRORS


def _result_code(error: sqlite3.Error) -> int | None:
    """Return SQLite's primary result code; None if Python's sqlite3 raised the error."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


@cache
def _positional(sql: str) -> tuple[str, list[int]]:
    """Return the SQL with `?` for parameters such as `$2`, and the argument indexes."""
    # In SQLite, `$2` is a parameter with a name, and the driver releases the GIL for the name of each parameter.
    return _PARAMETER.sub("?", sql), [int(number) - 1 for number in _PARAMETER.findall(sql)]


def _run(connection: sqlite3.Connection, sql: str, args: Args) -> sqlite3.Cursor:
    statement, places = _positional(sql)
    return connection.execute(statement, [args[place] for place in places])


def _begin(connection: sqlite3.Connection, durable: bool) -> None:
    if durable:
        connection.execute(_FULL)  # before BEGIN, because the pragma has no effect inside a transaction
    connection.execute("BEGIN IMMEDIATE")


def _commit(connection: sqlite3.Connection) -> None:
    connection.commit()
    connection.execute(_NORMAL)


def _roll_back(connection: sqlite3.Connection) -> None:
    connection.rollback()
    connection.execute(_NORMAL)


def _fetch(connection: sqlite3.Connection, sql: str, args: Args) -> list[Row]:
    return [dict(row) for row in _run(connection, sql, args)]


def _execute(connection: sqlite3.Connection, sql: str, args: Args) -> int:
    return max(_run(connection, sql, args).rowcount, 0)


def _write(connection: sqlite3.Connection, guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not _execute(connection, *guard):
            connection.rollback()
            return False
        for sql, rows in steps:
            _run_for_each(connection, sql, rows)
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    return True


def _run_for_each(connection: sqlite3.Connection, sql: str, rows: Sequence[Args]) -> None:
    """Run the statement `sql` once for each tuple of arguments in `rows`."""
    written, most_parameters = 0, connection.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER)  # 999 before SQLite 3.32
    for count in _ROWS_PER_INSERT:
        if rows and count * len(rows[0]) > most_parameters:
            continue
        # One statement inserts many rows, because the driver releases the GIL once per statement. Reacquiring the GIL
        # from a busy event loop takes longer than inserting a row.
        if len(rows) - written >= count and (insert := _multi_row_insert(sql, count)) is not None:
            while len(rows) - written >= count:
                connection.execute(insert, [value for row in rows[written : written + count] for value in row])
                written += count
    statement, places = _positional(sql)
    connection.executemany(statement, ([row[place] for place in places] for row in rows[written:]))


@cache
def _multi_row_insert(sql: str, rows: int) -> str | None:
    """Return an INSERT statement for `rows` rows, made from the statement for one row.

    Return None if `sql` is not an INSERT with the values `$1, $2, ...` in order.
    """
    match = _INSERT.fullmatch(sql)
    if match is None:
        return None
    head, row, tail = match.groups()
    count = row.count("$")
    if row != ", ".join(f"${number}" for number in range(1, count + 1)):
        return None
    values = ", ".join([f"({', '.join('?' * count)})"] * rows)
    return f"{head}{values}{tail}"


def _resolve(future: asyncio.Future[Any], outcome: Any) -> None:
    if not future.done():
        future.set_result(outcome)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
