"""API keys in the database, and gateways that watch for changes of them."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from cortex.postgres import Postgres
from cortex.running_gateway import eventually
from helexa.core.errors import ApiError
from helexa.cortex.access.auth import Authenticator
from helexa.cortex.access.keys import Principal, Window, digest_of
from helexa.cortex.ledger.keys_and_nodes import KeyStore
from helexa.cortex.ledger.storage import open_database
from helexa.cortex.ledger.storage.database import Database

FULL = Principal(
    "alice",
    "alice-1",
    role="admin",
    models=frozenset({"Org/M", "Org/Ü"}),
    hard_cap=10**15,
    window=Window("rolling", 3600),
    requests_per_minute=1,
    tokens_per_minute=2,
    concurrency=3,
    expires_at=2000.5,
)
BARE = Principal("bob", "bob-1")


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    opened = await open_database(url)
    try:
        await opened.migrate()
        yield opened
    finally:
        await opened.close()


@pytest.fixture
def store(database: Database) -> KeyStore:
    return KeyStore(database, count(1000.0).__next__)


async def test_stored_key_is_read_back_as_created_and_contains_only_a_digest(store: KeyStore) -> None:
    for principal in (FULL, BARE, replace(BARE, key_id="none", models=frozenset())):
        key, secret = await store.create(principal)
        assert key.principal == principal
        assert key.digest == digest_of(secret.get_secret_value().encode())
        assert secret.get_secret_value().startswith(key.hint)
        assert key in await store.list()
    assert [key.principal.key_id for key in await store.list()] == ["alice-1", "bob-1", "none"]


async def test_id_of_an_existing_or_revoked_key_cannot_be_used_again(store: KeyStore) -> None:
    await store.create(BARE)
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            await store.create(replace(BARE, account_id="another-account"))
        assert (caught.value.status, caught.value.code) == (409, "key_exists")
        await store.revoke("bob-1")
    outcomes = await asyncio.gather(*(store.create(FULL) for _ in range(10)), return_exceptions=True)
    assert sum(isinstance(outcome, tuple) for outcome in outcomes) == 1
    assert all(outcome.status == 409 for outcome in outcomes if isinstance(outcome, ApiError))


async def test_stored_keys_can_be_changed_and_revoked(store: KeyStore) -> None:
    await store.create(FULL)
    key = await store.change("alice-1", lambda principal: replace(principal, hard_cap=None, models=None))
    assert key.principal == replace(FULL, hard_cap=None, models=None)
    assert await store.list() == [key]
    key = await store.revoke("alice-1")
    assert key.revoked_at == 1001.0
    assert await store.revoke("alice-1") == key
    assert await store.list() == [key]
    unknown: list[Any] = [store.revoke("nobody"), store.change("nobody", lambda principal: principal)]
    for attempt in unknown:
        with pytest.raises(ApiError) as caught:
            await attempt
        assert (caught.value.status, caught.value.code) == (404, "key_not_found")


async def test_concurrent_changes_of_one_key_are_all_applied(store: KeyStore) -> None:
    await store.create(replace(BARE, hard_cap=0))

    def raise_cap(principal: Principal) -> Principal:
        return replace(principal, hard_cap=(principal.hard_cap or 0) + 1)

    await asyncio.gather(*(store.change("bob-1", raise_cap) for _ in range(20)))
    (key,) = await store.list()
    assert key.principal.hard_cap == 20
    assert await store.changes() == 21


async def test_failed_revocation_of_a_key_leaves_the_change_counter_unchanged(store: KeyStore) -> None:
    count_before = await store.changes()
    with pytest.raises(ApiError):
        await store.revoke("nobody")
    assert await store.changes() == count_before


async def test_only_changes_of_keys_are_committed_synchronously_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []  # SQLite's `synchronous` at each commit: 1 is NORMAL, 2 is FULL

    class RecordingConnection(sqlite3.Connection):
        def commit(self) -> None:
            levels.append(self.execute("PRAGMA synchronous").fetchone()[0])
            super().commit()

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=RecordingConnection))
    database = await open_database(f"sqlite:{tmp_path / 'cortex.db'}")
    try:
        await database.migrate()
        levels.clear()
        store = KeyStore(database)
        await store.create(BARE)
        await store.change(BARE.key_id, lambda principal: replace(principal, hard_cap=5))
        await store.revoke(BARE.key_id)
        assert levels == [2, 2, 2]
        with pytest.raises(ApiError):
            await store.revoke("nobody")  # rolled back
        async with database.transaction() as sql:
            await sql.execute("UPDATE key_changes SET count = count + 1")
        await database.write(("UPDATE key_changes SET count = count + 1", ()), [])
        assert levels == [2, 2, 2, 1, 1]
    finally:
        await database.close()


async def test_durable_transaction_commits_synchronously_on_postgres(postgres: Postgres) -> None:
    database = await open_database(postgres.new_database() + "&synchronous_commit=off")
    try:
        for durable, expected in ((False, "off"), (True, "on"), (False, "off")):
            async with database.transaction(durable=durable) as sql:
                (row,) = await sql.fetch("SHOW synchronous_commit")
            assert row["synchronous_commit"] == expected
    finally:
        await database.close()


async def test_every_gateway_sees_created_changed_and_revoked_keys(url: str, store: KeyStore) -> None:
    authenticators = [Authenticator(True, clock=lambda: 1000.0) for _ in range(3)]
    _, first_secret = await store.create(FULL)

    def admitted(secret: SecretStr) -> list[Principal | None]:
        return [_admitted(authenticator, secret.get_secret_value()) for authenticator in authenticators]

    async with _watching(url, authenticators[0]), _watching(url, authenticators[1]), _watching(url, authenticators[2]):
        assert admitted(first_secret) == [FULL] * 3
        _, secret = await store.create(BARE)
        await eventually(lambda: admitted(secret) == [BARE] * 3)
        await store.change("bob-1", lambda principal: replace(principal, concurrency=7))
        await eventually(lambda: admitted(secret) == [replace(BARE, concurrency=7)] * 3)
        await store.revoke("bob-1")
        await eventually(lambda: admitted(secret) == [None] * 3)
    assert admitted(first_secret) == [FULL] * 3


async def test_known_keys_are_accepted_while_the_database_is_unreachable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeyStore, "poll_secs", 0.001)
    database = await open_database(f"sqlite:{tmp_path / 'cortex.db'}")
    await database.migrate()
    authenticator = Authenticator(True)
    store = KeyStore(database, apply=authenticator.replace)
    _, secret = await store.create(BARE)
    _, other = await store.create(replace(BARE, key_id="other"))
    polls = 0

    async def refresh() -> None:
        nonlocal polls
        polls += 1
        await KeyStore.refresh(store)

    monkeypatch.setattr(store, "refresh", refresh)
    try:
        async with store.watching():
            await database.execute("ALTER TABLE key_changes RENAME TO gone")
            await eventually(lambda: "changes of keys cannot be read" in caplog.text)
            polls = 0
            await eventually(lambda: polls > 5)
            assert _admitted(authenticator, secret.get_secret_value()) == BARE
            await database.execute("ALTER TABLE gone RENAME TO key_changes")
            await store.revoke("other")
            await eventually(lambda: _admitted(authenticator, other.get_secret_value()) is None)
            assert caplog.text.count("changes of keys") == 1
    finally:
        await database.close()


def test_api_key_secrets_are_never_stored_in_the_database(tmp_path: Path) -> None:
    async def create_key() -> SecretStr:
        database = await open_database(f"sqlite:{tmp_path / 'cortex.db'}")
        await database.migrate()
        _, secret = await KeyStore(database).create(FULL)
        await database.close()
        return secret

    secret = asyncio.run(create_key())
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"alice-1" in stored
    # The hint is the first 8 characters. The next column may begin with the character that follows in the secret.
    assert secret.get_secret_value()[:8].encode() in stored
    assert secret.get_secret_value()[7:14].encode() not in stored


def _admitted(authenticator: Authenticator, secret: str) -> Principal | None:
    try:
        return authenticator.admit([(b"x-api-key", secret.encode())])
    except ApiError:
        return None


@asynccontextmanager
async def _watching(url: str, authenticator: Authenticator) -> AsyncIterator[None]:
    """Watch the keys with its own database connection, which updates `authenticator` as a gateway does."""
    database = await open_database(url)
    try:
        async with KeyStore(database, apply=authenticator.replace).watching():
            yield
    finally:
        await database.close()
