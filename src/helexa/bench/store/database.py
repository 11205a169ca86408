"""Opens the SQLite database for writing or reading, and migrates its schema."""

import fcntl
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from helexa.core.errors import HelexaError

_BUSY_TIMEOUT_SECS = 10.0
_NUMBERED = re.compile(r"(\d{4})\.sql")


class StoreError(HelexaError):
    """The database cannot be opened, read or changed as requested."""


def open_writer(path: Path) -> sqlite3.Connection:
    """Open the database for writing. Create the file if it is missing, and migrate its schema.

    Raises:
        StoreError: the file cannot be opened, is not a database, or was written by a newer version of helexa.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_SECS, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot open {path}: {_reason(error)}") from error
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a sample may have taken minutes
        connection.execute("PRAGMA foreign_keys = ON")
        _migrate(connection, path)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise StoreError(f"cannot open {path}: {error}") from error
        raise
    connection.row_factory = sqlite3.Row
    return connection


@contextmanager
def measuring(path: Path) -> Iterator[None]:
    """Hold a file lock in the `with` block, which prevents other processes from measuring at the same time.

    Raises:
        StoreError: another process holds the lock, or the lock file cannot be opened.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    except OSError as error:
        raise StoreError(f"cannot open {lock}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"another helexa-bench is measuring into {path}") from None
        yield


def open_reader(path: Path) -> sqlite3.Connection:
    """Open the database for reading. Another process may write to it at the same time.

    Only one thread at a time may use the connection.

    Raises:
        StoreError: the file is missing, is not a database, or has another schema version.
    """
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro",
            uri=True,
            timeout=_BUSY_TIMEOUT_SECS,
            isolation_level=None,
            check_same_thread=False,
        )
    except sqlite3.Error as error:
        raise StoreError(f"cannot open {path}: {error}; has anything been measured yet?") from error
    try:
        version = _version(connection)
    except sqlite3.Error as error:
        connection.close()
        raise StoreError(f"cannot read {path}: {error}") from error
    if version != newest():
        connection.close()
        raise StoreError(f"{path} has schema {version}, this helexa reads {newest()}; start the writer of this version")
    connection.row_factory = sqlite3.Row
    return connection


def newest() -> int:
    """Return the schema version that this program reads and writes."""
    return _migrations()[-1][0]


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("BEGIN IMMEDIATE")  # two processes may start concurrently
    version = _version(connection)
    if version > newest():
        connection.execute("ROLLBACK")
        raise StoreError(f"{path} was written by a newer helexa (schema {version}, known {newest()}); update this one")
    for number, script in _migrations():
        if number > version:
            for statement in _statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
    connection.execute("COMMIT")


def _version(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _migrations() -> list[tuple[int, str]]:
    """Return version number and SQL script of each schema migration, in ascending order."""
    files = resources.files("helexa.bench.store").joinpath("migrations").iterdir()
    numbered = ((_NUMBERED.fullmatch(file.name), file) for file in files)
    return sorted((int(match[1]), file.read_text("utf-8")) for match, file in numbered if match)


def _statements(script: str) -> list[str]:
    """Split an SQL script into statements.

    `executescript` is not used, because it would commit the open transaction.
    """
    statements: list[str] = []
    lines: list[str] = []
    for line in script.splitlines():
        lines.append(line)
        if sqlite3.complete_statement(text := "\n".join(lines)):
            statements.append(text)
            lines = []
    return statements


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
