"""The one door to the database: SQLite for a single gateway, PostgreSQL when several share one ledger.

SQL is written once. Both understand `$1` placeholders, `ON CONFLICT` and `RETURNING`; there is no query builder in
between, because a group commit must cost microseconds per request.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from helexa.core.errors import HelexaError

Row = dict[str, Any]
Args = Sequence[Any]
Step = tuple[str, Sequence[Args]]  # one statement, and its arguments for each of its runs


class DatabaseError(HelexaError):
    """The database cannot be reached or does not do its work just now."""


class Sql(Protocol):
    """What a transaction offers."""

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        """The rows of one statement.

        Raises:
            DatabaseError: the database does not answer.
        """
        ...

    async def execute(self, sql: str, *args: Any) -> int:
        """Run one statement and return how many rows it changed.

        Raises:
            DatabaseError: the database does not answer.
        """
        ...


class Database(ABC):
    """An open database. All methods raise `DatabaseError` when it does not answer."""

    @abstractmethod
    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        """The rows of one reading statement; what writes and returns rows belongs in a transaction."""

    @abstractmethod
    async def execute(self, sql: str, *args: Any) -> int:
        """Run one statement in a transaction of its own and return how many rows it changed."""

    @abstractmethod
    def transaction(self, *, durable: bool = False) -> AbstractAsyncContextManager[Sql]:
        """A writing transaction: committed when the block ends, undone when it raises.

        Args:
            durable: a power failure after the commit cannot undo it. Each such commit waits for the disk.
        """

    @abstractmethod
    async def write(self, guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
        """Run a whole batch in one transaction and as few hops as possible.

        Returns:
            False, with nothing written, when the guard changed no row.
        """

    @abstractmethod
    async def claim(self) -> Path | None:
        """Take the place of a gateway.

        Returns:
            The database's file when no other gateway can be at work on it until it is closed, else None.

        Raises:
            HelexaError: another gateway has this place.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish what is under way and let go of all connections."""

    @abstractmethod
    def _dialect(self, statement: str) -> str:
        """A statement of a migration, which is written in SQLite's types, for this database."""

    @abstractmethod
    async def _lock_schema(self, sql: Sql) -> None:
        """Let no other process migrate until the transaction ends."""

    async def migrate(self) -> None:
        """Bring the tables up to date; any number of processes may try at once.

        Raises:
            HelexaError: the database was made by a newer helexa.
        """
        known = _migrations()
        async with self.transaction() as sql:
            await self._lock_schema(sql)
            await sql.execute(
                self._dialect(
                    "CREATE TABLE IF NOT EXISTS migrations "
                    "(version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL) STRICT"
                )
            )
            applied = {row["version"] for row in await sql.fetch("SELECT version FROM migrations")}
            if unknown := applied - known.keys():
                raise HelexaError(
                    f"the ledger's database is at version {max(unknown)}, newer than this helexa knows "
                    f"({max(known)}); upgrade helexa"
                )
            for version in sorted(known.keys() - applied):
                name, text = known[version]
                for statement in _statements(text):
                    await sql.execute(self._dialect(statement))
                await sql.execute("INSERT INTO migrations VALUES ($1, $2, $3)", version, name, time.time())


def _migrations() -> dict[int, tuple[str, str]]:
    folder = resources.files("helexa.cortex.ledger") / "migrations"
    files = [file for file in folder.iterdir() if file.name.endswith(".sql")]
    return {int(file.name[:4]): (file.name.removesuffix(".sql"), file.read_text("utf-8")) for file in files}


def _statements(text: str) -> list[str]:
    without_comments = re.sub(r"--.*", "", text)
    return [statement.strip() for statement in without_comments.split(";") if statement.strip()]
