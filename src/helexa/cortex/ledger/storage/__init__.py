"""The ledger's database: SQLite, or PostgreSQL for several gateways."""

from helexa.core.errors import ConfigError
from helexa.cortex.ledger.storage.database import Database
from helexa.cortex.ledger.storage.sqlite import open_sqlite


async def open_database(url: str) -> Database:
    """Open `sqlite:PATH` or `postgresql://...` without migrating the tables.

    Raises:
        ConfigError: the URL has another scheme, or the driver is not installed.
        DatabaseError: the database cannot be reached.
    """
    scheme, _, location = url.partition(":")
    if scheme == "sqlite" and location:
        return await open_sqlite(location)
    if scheme in ("postgresql", "postgres"):
        from helexa.cortex.ledger.storage.postgres import open_postgres  # imports asyncpg, an optional dependency

        return await open_postgres(url)
    # The message omits the URL, which may contain a password.
    raise ConfigError("ledger.url is neither sqlite:PATH nor postgresql://...; write one of these")
