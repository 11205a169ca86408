"""Opens the database that the ledger's URL names."""

from helexa.core.errors import HelexaError
from helexa.cortex.ledger.storage.database import Database
from helexa.cortex.ledger.storage.sqlite import open_sqlite


async def open_database(url: str) -> Database:
    """Open `sqlite:PATH` or `postgresql://...`; its tables are not touched.

    Raises:
        HelexaError: the URL is neither, or its driver is not installed.
        DatabaseError: the database cannot be reached.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite" and rest:
        return await open_sqlite(rest)
    if scheme in ("postgresql", "postgres"):
        from helexa.cortex.ledger.storage.postgres import open_postgres  # needs asyncpg, which is optional

        return await open_postgres(url)
    raise HelexaError(
        "the ledger's url is neither sqlite:PATH nor postgresql://..."
    )  # not repeated: it may hold a secret
