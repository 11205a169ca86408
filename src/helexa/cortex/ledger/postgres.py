"""PostgreSQL behind the ledger, for several gateways on one."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from helexa.core.errors import HelexaError
from helexa.cortex.ledger.database import Args, Database, DatabaseError, Row, Sql, Step

try:
    import asyncpg
except ImportError as error:
    raise HelexaError("a ledger in PostgreSQL needs asyncpg: pip install 'helexa[postgres]'") from error
if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

_SCHEMA_LOCK = 0x68656C657861  # "helexa"
_CONNECT_TIMEOUT_SECS = 5.0
_STATEMENT_TIMEOUT_SECS = 10.0
_QUERY_TIMEOUT_SECS = 60.0  # a statement of accounts may read much
_CONNECTIONS = 8
_TYPES = {
    "INTEGER PRIMARY KEY AUTOINCREMENT": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "INTEGER": "BIGINT",
    "REAL": "DOUBLE PRECISION",
    "BLOB": "BYTEA",
}
_TYPE = re.compile("|".join(rf"\b{name}\b" for name in _TYPES))
_TABLE_OPTIONS = re.compile(r"\)\s*(STRICT|WITHOUT ROWID)(,\s*(STRICT|WITHOUT ROWID))?\s*$")


async def open_postgres(url: str) -> Database:
    """Connect to `postgresql://user:password@host/database`.

    Raises:
        DatabaseError: nobody answers there, or the name or password is wrong.
    """
    try:
        with _words():
            pool = await asyncpg.create_pool(
                url,
                min_size=0,
                max_size=_CONNECTIONS,
                timeout=_CONNECT_TIMEOUT_SECS,
                command_timeout=_STATEMENT_TIMEOUT_SECS,
                reset=_nothing_to_reset,
            )
            await pool.fetchval("SELECT 1")
    except ValueError as error:
        raise DatabaseError("the ledger's PostgreSQL url is malformed") from error  # not repeated: it holds a password
    return _Postgres(pool)


async def _nothing_to_reset(connection: "PoolConnectionProxy") -> None:
    """Transactions are all that we leave on a connection, and they end; it saves a round trip per use."""


@contextmanager
def _words() -> Iterator[None]:
    """A lost or refused connection, in words. What is wrong with a statement is a fault of ours and stays as it is."""
    try:
        yield
    except ValueError:  # an argument of the wrong type is an InterfaceError too
        raise
    except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
        raise DatabaseError(f"the ledger's PostgreSQL refuses us: {error}") from error
    except (
        OSError,
        asyncpg.PostgresConnectionError,
        asyncpg.InterfaceError,
        asyncpg.OperatorInterventionError,
        asyncpg.InsufficientResourcesError,
        asyncpg.TransactionRollbackError,
    ) as error:
        raise DatabaseError(f"the ledger's PostgreSQL does not answer: {type(error).__name__}") from error


class _Postgres(Database):
    def __init__(self, pool: "asyncpg.Pool") -> None:
        self._pool = pool

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        with _words():
            return [dict(row) for row in await self._pool.fetch(sql, *args, timeout=_QUERY_TIMEOUT_SECS)]

    async def execute(self, sql: str, *args: Any) -> int:
        with _words():
            return _changed(await self._pool.execute(sql, *args))

    def transaction(self) -> AbstractAsyncContextManager[Sql]:
        return self._transaction()

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Sql]:
        with _words():
            connection = await self._pool.acquire()
        try:
            transaction = connection.transaction()
            with _words():
                await transaction.start()
            try:
                yield _Transaction(connection)
            except BaseException:
                with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):  # lost: undone by the server
                    await transaction.rollback()
                raise
            with _words():
                await transaction.commit()
        finally:
            await self._pool.release(connection)

    async def write(self, guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
        with _words():
            async with self._pool.acquire() as connection, connection.transaction():
                if not _changed(await connection.execute(guard[0], *guard[1])):
                    return False
                for sql, runs in steps:
                    await connection.executemany(sql, runs)
        return True

    async def claim(self) -> None:
        return None

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_SECS):
                await self._pool.close()
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            self._pool.terminate()

    def _dialect(self, statement: str) -> str:
        return _TYPE.sub(lambda found: _TYPES[found[0]], _TABLE_OPTIONS.sub(")", statement))

    async def _lock_schema(self, sql: Sql) -> None:
        await sql.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)


class _Transaction:
    def __init__(self, connection: "PoolConnectionProxy") -> None:
        self._connection = connection

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        with _words():
            return [dict(row) for row in await self._connection.fetch(sql, *args)]

    async def execute(self, sql: str, *args: Any) -> int:
        with _words():
            return _changed(await self._connection.execute(sql, *args))


def _changed(status: str) -> int:
    """The number in `UPDATE 3`; 0 for statements that change no rows."""
    count = status.rpartition(" ")[2]
    return int(count) if count.isdigit() and not status.startswith("SELECT") else 0
