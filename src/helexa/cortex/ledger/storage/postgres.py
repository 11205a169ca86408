"""PostgreSQL backend of the ledger. Several gateways can share one database."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from helexa.core.errors import ConfigError
from helexa.cortex.ledger.storage.database import Args, Database, DatabaseError, Row, Sql, Step

try:
    import asyncpg
except ImportError as error:
    raise ConfigError(
        "a ledger in PostgreSQL needs asyncpg, which is not installed; run `pip install 'helexa[postgres]'`"
    ) from error
if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

_SCHEMA_LOCK = 0x68656C657861  # key of the advisory lock: the bytes of "helexa"
# On servers with `synchronous_commit = off`, makes the commit of the current transaction wait for the disk.
_WAIT_FOR_DISK = (
    "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
)
_CONNECT_TIMEOUT_SECS = 5.0
_STATEMENT_TIMEOUT_SECS = 10.0
_QUERY_TIMEOUT_SECS = 60.0  # queries may sum many rows
_CONNECTIONS = 8
# Pairs of SQLite's syntax in migrations and PostgreSQL's syntax, replaced in this order.
_DIALECT = (
    (" STRICT, WITHOUT ROWID", ""),
    (" STRICT", ""),
    ("INTEGER PRIMARY KEY AUTOINCREMENT", "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"),
    ("INTEGER", "BIGINT"),
    ("REAL", "DOUBLE PRECISION"),
    ("BLOB", "BYTEA"),
)

# asyncpg's exceptions: server errors, client errors, protocol errors, lost connections.
_DRIVER_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    EOFError,
)
# Errors of one statement or of its values; the connection and the server stay usable, and a retry would fail again.
_STATEMENT_ERRORS = (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError, asyncpg.SyntaxOrAccessError)
# Errors after which the connection and its server are usable, and a retry may succeed.
_TRANSIENT_ERRORS = (asyncpg.TransactionRollbackError, asyncpg.InsufficientResourcesError)


async def open_postgres(url: str) -> Database:
    """Connect to `postgresql://user:password@host/database` and return the database.

    The URL may list several hosts (`host1:5432,host2:5432`). Connections then go to the first host that accepts writes,
    unless the URL itself sets `target_session_attrs`.

    Raises:
        ConfigError: a certificate file in the URL cannot be used.
        DatabaseError: no host answers, no host accepts writes, or the name or password is wrong.
    """
    options: dict[str, Any] = {}
    try:
        _check_certificates(url)
        hosts = _hosts(url)
        if len(hosts) > 1:
            options["connect"] = _Connector(hosts)
            if "target_session_attrs" not in parse_qs(urlsplit(url).query):
                options["target_session_attrs"] = "read-write"
        pool = await asyncpg.create_pool(
            url,
            min_size=0,
            max_size=_CONNECTIONS,
            timeout=_CONNECT_TIMEOUT_SECS,
            command_timeout=_STATEMENT_TIMEOUT_SECS,
            reset=_nothing_to_reset,
            **options,
        )
        await pool.fetchval("SELECT 1")
    except ValueError as error:
        raise DatabaseError(
            "the ledger's PostgreSQL url is malformed; write it like postgresql://USER@HOST/DATABASE"
        ) from error  # the message omits the URL, which holds a password
    except _DRIVER_ERRORS as error:
        raise DatabaseError(_description(error)) from error
    return _Postgres(pool)


def _check_certificates(url: str) -> None:
    """Raise `ConfigError` if a certificate or key file in the URL cannot be used."""
    files = {name: values[-1] for name, values in parse_qs(urlsplit(url).query).items()}
    certificate, root = files.get("sslcert"), files.get("sslrootcert")
    for file, name in ((certificate, "sslcert"), (files.get("sslkey"), "sslkey"), (root, "sslrootcert")):
        try:
            if file is not None:
                Path(file).read_bytes()
        except OSError as error:
            message = (
                f"{file}: {name} in ledger.url cannot be read ({error.strerror}); let the gateway's user read the file"
            )
            raise ConfigError(message) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if certificate is not None:
            context.load_cert_chain(certificate, files.get("sslkey"), files.get("sslpassword", ""))
        if root is not None:
            context.load_verify_locations(root)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"the certificate does not match its key {files.get('sslkey', certificate)}"
        else:
            message = f"cannot be loaded as a certificate with its key: {error.reason}"
        raise ConfigError(
            f"{certificate or root}: {message}; check sslcert, sslkey and sslrootcert in ledger.url"
        ) from None


async def _nothing_to_reset(connection: "PoolConnectionProxy") -> None:
    """Do nothing when a connection returns to the pool.

    asyncpg's default would reset the session with a round trip. The ledger leaves no session state to reset.
    """


def _hosts(url: str) -> list[tuple[str, int | None]]:
    """Return the hosts and ports that a URL lists."""
    split_url = urlsplit(url)
    query = parse_qs(split_url.query)
    hosts = (split_url.netloc.rpartition("@")[2] or query.get("host", [""])[-1]).split(",")
    ports = query.get("port", [""])[-1].split(",")
    ports *= len(hosts) if len(ports) == 1 else 1
    addresses: list[tuple[str, int | None]] = []
    for host, port in zip(hosts, ports, strict=True):
        if host.startswith("/"):  # directory of a Unix socket, which may contain colons
            addresses.append((host, int(port) if port else None))
        else:
            address = urlsplit(f"//{host}")
            addresses.append((unquote(address.hostname or ""), address.port or (int(port) if port else None)))
    return addresses


class _Connector:
    """Connects to the first host that accepts a connection; the last used comes first."""

    def __init__(self, hosts: list[tuple[str, int | None]]) -> None:
        self._hosts = hosts

    # asyncpg itself can try several hosts, but with one timeout for all hosts together. A first host that drops packets
    # would use up the whole timeout.
    async def __call__(self, *args: Any, **options: Any) -> "asyncpg.Connection":
        """Connect to the first host that accepts; each host gets the whole timeout."""
        last_error: Exception | None = None
        for host, port in self._hosts:
            try:
                connection = await asyncpg.connect(*args, host=host, port=port, **options)
            except _DRIVER_ERRORS as error:
                last_error = error
            else:
                # Make a new list, because another connection attempt may be iterating over the current list.
                self._hosts = sorted(self._hosts, key=lambda other: other != (host, port))
                return connection
        assert last_error is not None
        raise last_error


def _is_statement_error(error: Exception) -> bool:
    if isinstance(error, asyncpg.InterfaceError):
        return isinstance(error, ValueError)  # a value has the wrong type for its column
    return isinstance(error, _STATEMENT_ERRORS) and not isinstance(error, asyncpg.InsufficientPrivilegeError)


def _description(error: Exception) -> str:
    if isinstance(error, (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError)):
        return (
            f"the ledger's PostgreSQL rejects the connection: {error}; check user, password and database in ledger.url"
        )
    if isinstance(error, (asyncpg.ReadOnlySQLTransactionError, asyncpg.TargetServerAttributeNotMatched)):
        return "the ledger's PostgreSQL is read-only; set ledger.url to the primary server"
    if isinstance(error, asyncpg.PostgresError):
        return f"the ledger's PostgreSQL reported an error: {type(error).__name__}: {error}; see the log of PostgreSQL"
    return f"the ledger's PostgreSQL does not answer: {type(error).__name__}; start PostgreSQL, or check ledger.url"


class _Postgres(Database):
    def __init__(self, pool: "asyncpg.Pool") -> None:
        super().__init__("set ledger.url to a new database, and create the keys again with `cortex keys create`")
        self._pool = pool

    @asynccontextmanager
    async def errors(self) -> AsyncIterator[None]:
        """Return a context manager that converts asyncpg's exceptions to `DatabaseError`.

        Exceptions that a wrong statement or wrong values caused are raised unchanged. After a server or connection
        error, all connections are replaced. An old connection may lead to a server that is no longer the primary, or
        may refer to prepared statements that the new primary does not have.
        """
        try:
            yield
        except _DRIVER_ERRORS as error:
            if _is_statement_error(error):
                raise
            if not isinstance(error, _TRANSIENT_ERRORS):
                await self._pool.expire_connections()
            raise DatabaseError(_description(error)) from error

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        async with self.errors():
            return [dict(row) for row in await self._pool.fetch(sql, *args, timeout=_QUERY_TIMEOUT_SECS)]

    async def execute(self, sql: str, *args: Any) -> int:
        async with self.errors():
            return _row_count(await self._pool.execute(sql, *args))

    def transaction(self, *, durable: bool = False) -> AbstractAsyncContextManager[Sql]:
        return self._transaction(durable)

    @asynccontextmanager
    async def _transaction(self, durable: bool) -> AsyncIterator[Sql]:
        async with self.errors():
            connection = await self._pool.acquire()
        try:
            transaction = connection.transaction()
            async with self.errors():
                await transaction.start()
            try:
                if durable:
                    async with self.errors():
                        await connection.execute(_WAIT_FOR_DISK)
                yield _Transaction(connection, self.errors)
            except BaseException:
                with suppress(*_DRIVER_ERRORS):  # if the connection is lost, the server rolls back
                    await transaction.rollback()
                raise
            async with self.errors():
                await transaction.commit()
        finally:
            async with self.errors():
                await self._pool.release(connection)

    async def write(self, guard: tuple[str, Args], steps: Sequence[Step]) -> bool:
        async with self.errors(), self._pool.acquire() as connection, connection.transaction():
            if not _row_count(await connection.execute(guard[0], *guard[1])):
                return False
            for sql, rows in steps:
                await connection.executemany(sql, rows)
        return True

    async def claim(self) -> None:
        return None

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_SECS):
                await self._pool.close()
        except _DRIVER_ERRORS:
            self._pool.terminate()

    def _dialect(self, statement: str) -> str:
        for sqlite_syntax, postgres_syntax in _DIALECT:
            statement = statement.replace(sqlite_syntax, postgres_syntax)
        return statement

    async def _lock_schema(self, sql: Sql) -> None:
        await sql.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)


class _Transaction(Sql):
    def __init__(
        self, connection: "PoolConnectionProxy", errors: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        self._connection = connection
        self._errors = errors

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        async with self._errors():
            return [dict(row) for row in await self._connection.fetch(sql, *args)]

    async def execute(self, sql: str, *args: Any) -> int:
        async with self._errors():
            return _row_count(await self._connection.execute(sql, *args))


def _row_count(status: str) -> int:
    """Return the number of changed rows in a command tag such as `UPDATE 3`, else 0."""
    count = status.rpartition(" ")[2]
    return int(count) if count.isdigit() and not status.startswith("SELECT") else 0
