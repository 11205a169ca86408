"""Database interface: SQLite for a single gateway, PostgreSQL for several gateways that share one ledger.

Both databases run the same SQL text: both understand `$1` placeholders, `ON CONFLICT` and `RETURNING`. helexa uses no
SQL builder, because writing a request must cost only microseconds.
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
Step = tuple[str, Sequence[Args]]  # one statement, and the arguments of each execution


class DatabaseError(HelexaError):
    """Raised if the database cannot be reached, or reports an error that may be temporary (locked, full, read-only)."""


class Sql(Protocol):
    """Interface of a transaction: runs SQL statements."""

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        """Return the rows of one statement.

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
    """An open database. All methods raise `DatabaseError` when the database does not answer."""

    @abstractmethod
    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        """Return the rows of one read-only statement.

        Run a statement that writes and returns rows in a `transaction` instead.
        """

    @abstractmethod
    async def execute(self, sql: str, *args: Any) -> int:
        """Run one statement in its own transaction and return how many rows it changed."""

    @abstractmethod
    def transaction(self, *, durable: bool = False) -> AbstractAsyncContextManager[Sql]:
        """Open a writing transaction: committed when the block ends, rolled back when the block raises.

        Args:
            durable: True if the commit must survive a power failure. Each durable commit waits for the disk.
        """

    @abstractmethod
    async def write(self, guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
        """Run a batch of statements in one transaction with as few round trips as possible.

        Args:
            guard: statement and arguments; the batch is written only if the guard changes a row.
            steps: the statements of the batch.

        Returns:
            False, with nothing written, if the guard changed no row.
        """

    @abstractmethod
    async def claim(self) -> Path | None:
        """Claim the database for this gateway, if the backend allows only one gateway.

        Returns:
            The path of the database's file if no other gateway can use the database until it is closed. None if several
            gateways can share the database.

        Raises:
            HelexaError: another gateway uses the database.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish running statements and close all connections."""

    @abstractmethod
    def _dialect(self, statement: str) -> str:
        """Translate a migration statement, which uses SQLite's types, to the SQL of this database."""

    @abstractmethod
    async def _lock_schema(self, sql: Sql) -> None:
        """Prevent other processes from migrating the tables until the transaction ends."""

    async def migrate(self) -> None:
        """Create or upgrade the tables. Several processes may call this at the same time.

        Raises:
            HelexaError: a newer version of helexa created or upgraded the database.
        """
        known_migrations = _migrations()
        async with self.transaction() as sql:
            await self._lock_schema(sql)
            await sql.execute(
                self._dialect(
                    "CREATE TABLE IF NOT EXISTS migrations "
                    "(version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at REAL NOT NULL) STRICT"
                )
            )
            applied_versions = {row["version"] for row in await sql.fetch("SELECT version FROM migrations")}
            if unknown_versions := applied_versions - known_migrations.keys():
                raise HelexaError(
                    f"the ledger's database is at version {max(unknown_versions)}, newer than this helexa knows "
                    f"({max(known_migrations)}); upgrade helexa"
                )
            for version in sorted(known_migrations.keys() - applied_versions):
                name, text = known_migrations[version]
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
