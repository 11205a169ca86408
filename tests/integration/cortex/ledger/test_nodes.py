"""Invitations and joined nodes in the database, which several gateways may share."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from ipaddress import ip_network

import pytest
from pydantic import SecretStr

from helexa.core.errors import ApiError
from helexa.cortex.ledger import keys_and_nodes
from helexa.cortex.ledger.keys_and_nodes import JoinedNode, NodeStore
from helexa.cortex.ledger.storage import open_database
from helexa.cortex.ledger.storage.database import Database

KEY = SecretStr("key-of-the-node")


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    database = await open_database(url)
    await database.migrate()
    yield database
    await database.close()


async def test_invitation_is_stored_without_its_token(database: Database) -> None:
    store = NodeStore(database)
    created, token = await store.invite(60, "beast", [ip_network("10.0.0.0/8"), ip_network("fd00::/8")])
    assert await store.invitation(token.get_secret_value()) == created
    assert await store.invitation("hlxjoin_other") is None
    (row,) = await database.fetch("SELECT * FROM invitations")
    assert token.get_secret_value() not in str(row)
    assert (created.node, len(created.networks), created.hint) == ("beast", 2, token.get_secret_value()[:12])


async def test_only_one_of_several_concurrent_joins_with_one_invitation_succeeds(database: Database) -> None:
    store = NodeStore(database)
    invitation, _ = await store.invite(60)
    outcomes = await asyncio.gather(
        *(store.add(invitation, f"n{number}", f"http://10.0.0.{number}", KEY) for number in range(5)),
        return_exceptions=True,
    )
    assert outcomes.count(None) == 1
    assert {error.code for error in outcomes if isinstance(error, ApiError)} == {"invalid_invitation"}
    assert len(await store.list()) == 1


async def test_rejected_node_does_not_use_up_its_invitation(database: Database) -> None:
    store = NodeStore(database)
    first, _ = await store.invite(60)
    await store.add(first, "a", "http://10.0.0.1", KEY)
    second, token = await store.invite(60)
    for name, endpoint in (("a", "http://10.0.0.2"), ("b", "http://10.0.0.1")):
        with pytest.raises(ApiError) as rejected:
            await store.add(second, name, endpoint, KEY)
        assert rejected.value.code == "node_exists"
    assert await store.invitation(token.get_secret_value()) == second


async def test_invitation_beyond_the_maximum_number_of_open_invitations_is_rejected(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_and_nodes, "MAX_INVITATIONS", 2)
    now = [1000.0]
    store = NodeStore(database, lambda: now[0])
    for _ in range(2):
        await store.invite(60)
    with pytest.raises(ApiError, match="2 invitations are neither used nor expired"):
        await store.invite(60)
    now[0] += 61
    await store.invite(60)


async def test_gateway_applies_joined_nodes_only_after_their_list_has_changed(database: Database) -> None:
    seen: list[list[str]] = []

    def apply(joined: Sequence[JoinedNode]) -> None:
        seen.append([node.name for node in joined])

    store = NodeStore(database)
    watched = NodeStore(database, apply=apply)
    await watched.refresh()
    await watched.refresh()
    invitation, _ = await store.invite(60)
    await store.add(invitation, "a", "http://10.0.0.1", KEY)
    await watched.refresh()
    assert await store.remove("a")
    assert not await store.remove("a")
    await watched.refresh()
    assert seen == [[], ["a"], []]
