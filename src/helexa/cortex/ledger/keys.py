"""Stores API keys in the database, and keeps the gateway's copy of the keys in memory up to date."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import orjson
from pydantic import SecretStr

from helexa.core.errors import ApiError
from helexa.cortex.access.auth import Authenticator
from helexa.cortex.access.key import Key, digest_of, hint_of, new_secret
from helexa.cortex.access.principal import Principal, Window
from helexa.cortex.ledger.periodic import repeat
from helexa.cortex.ledger.storage.database import Database, Row, Sql

POLL_SECS = 0.25
_COLUMNS = (
    "key_id, account_id, role, models, hard_cap, window_kind, window_seconds, requests_per_minute, tokens_per_minute, "
    "concurrency, expires_at"
)


class KeyStore:
    """Creates, lists, changes and revokes API keys in the database.

    A secret is returned once, when its key is created, and is never stored. Changes survive a power failure, so a
    revoked key stays revoked. All methods raise `DatabaseError` when the database does not answer.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    async def create(self, principal: Principal) -> tuple[Key, SecretStr]:
        """Create a key and return it with its secret. The secret cannot be read again later.

        Raises:
            ApiError: 409 if a key with this id exists. An id of a revoked key cannot be reused either, because charges
                are stored under this id.
        """
        secret = new_secret()
        key = Key(principal, digest_of(secret.get_secret_value().encode()), hint_of(secret), self._clock())
        values = (*_values(principal), key.digest, key.hint, key.created_at)
        async with self._changing() as sql:
            if await sql.fetch("SELECT 1 FROM keys WHERE key_id = $1", principal.key_id):
                raise ApiError(409, "key_exists", f"key '{principal.key_id}' already exists", param="key_id")
            await sql.execute(
                f"INSERT INTO keys ({_COLUMNS}, digest, hint, created_at) "
                "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
                *values,
            )
        return key, secret

    async def list(self) -> list[Key]:
        """Return all keys including revoked ones, oldest first."""
        return [_key(row) for row in await self._database.fetch("SELECT * FROM keys ORDER BY created_at, key_id")]

    async def change(self, key_id: str, edit: Callable[[Principal], Principal]) -> Key:
        """Replace a key's principal (its account and terms) by `edit(principal)` and return the changed key.

        Raises:
            ApiError: 404 if no key has the id `key_id`.
        """
        async with self._changing() as sql:
            key = await _find(sql, key_id)
            key = replace(key, principal=edit(key.principal))
            await sql.execute(
                "UPDATE keys SET account_id = $2, role = $3, models = $4, hard_cap = $5, window_kind = $6, "
                "window_seconds = $7, requests_per_minute = $8, tokens_per_minute = $9, concurrency = $10, "
                "expires_at = $11 WHERE key_id = $1",
                *_values(key.principal),
            )
        return key

    async def revoke(self, key_id: str) -> Key:
        """Revoke a key permanently and return the key. Revoking a revoked key changes nothing.

        Raises:
            ApiError: 404 if no key has the id `key_id`.
        """
        async with self._changing() as sql:
            key = await _find(sql, key_id)
            if key.revoked_at is None:
                key = replace(key, revoked_at=self._clock())
                await sql.execute("UPDATE keys SET revoked_at = $2 WHERE key_id = $1", key_id, key.revoked_at)
        return key

    async def changes(self) -> int:
        """Return a counter that is incremented whenever any gateway changes a key."""
        (row,) = await self._database.fetch("SELECT count FROM key_changes")
        return row["count"]

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[Sql]:
        async with self._database.transaction(durable=True) as sql:
            # This statement must be first: its row lock serializes changes of keys across gateways.
            await sql.execute("UPDATE key_changes SET count = count + 1")
            yield sql


class Keyring:
    """Copies the keys from the database to the `Authenticator`, which authenticates requests with them.

    As long as the database does not answer, the last known keys remain valid.
    """

    def __init__(self, store: KeyStore, authenticator: Authenticator) -> None:
        self.store = store
        self.authenticator = authenticator
        self._loaded_counter: int | None = None
        self._refreshing = asyncio.Lock()

    async def refresh(self) -> None:
        """Load all keys from the database if any key has changed since the last call.

        Raises:
            DatabaseError: the database does not answer.
        """
        async with self._refreshing:
            change_counter = await self.store.changes()
            if change_counter != self._loaded_counter:  # keys are read after the counter, so they are never older
                self.authenticator.replace(await self.store.list())
                self._loaded_counter = change_counter

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Return a context manager that loads the keys and keeps them up to date until its block ends.

        A background task calls `refresh` every `POLL_SECS`.

        Raises:
            DatabaseError: the database does not answer when the keys are first loaded.
        """
        await self.refresh()
        # If this task ended, revoked keys would stay valid, so it continues after any exception.
        task = asyncio.create_task(repeat(self.refresh, POLL_SECS, "changes of keys cannot be read"))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _find(sql: Sql, key_id: str) -> Key:
    rows = await sql.fetch("SELECT * FROM keys WHERE key_id = $1", key_id)
    if not rows:
        raise ApiError(404, "key_not_found", f"key '{key_id[:200]}' not found", param="key_id")
    return _key(rows[0])


def _values(principal: Principal) -> tuple[Any, ...]:
    """Return the principal's attributes as values for the database columns `_COLUMNS`, in the same order."""
    return (
        principal.key_id,
        principal.account_id,
        principal.role,
        None if principal.models is None else orjson.dumps(sorted(principal.models)).decode(),
        principal.hard_cap,
        principal.window.kind,
        principal.window.seconds,
        principal.requests_per_minute,
        principal.tokens_per_minute,
        principal.concurrency,
        principal.expires_at,
    )


def _key(row: Row) -> Key:
    principal = Principal(
        account_id=row["account_id"],
        key_id=row["key_id"],
        role=row["role"],
        models=None if row["models"] is None else frozenset(orjson.loads(row["models"])),
        hard_cap=row["hard_cap"],
        window=Window(row["window_kind"], row["window_seconds"]),
        requests_per_minute=row["requests_per_minute"],
        tokens_per_minute=row["tokens_per_minute"],
        concurrency=row["concurrency"],
        expires_at=row["expires_at"],
    )
    return Key(principal, bytes(row["digest"]), row["hint"], row["created_at"], row["revoked_at"])
