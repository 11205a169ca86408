"""A gateway during an outage of its database or nodes."""

import sqlite3
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.postgres import Postgres
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.cortex.ledger.storage import sqlite


async def test_postgres_outage_accepts_known_keys_and_rejects_changes(postgres: Postgres, node: FakeNode) -> None:
    entitlements = {"require_auth": True, "keys": [{"key": "root", "account_id": "ops", "role": "admin"}]}
    settings = {"ledger": {"url": postgres.new_database()}, "entitlements": entitlements}
    headers = {"x-api-key": "root"}
    async with running_cortex(node, settings=settings) as cortex:

        async def keys() -> int:
            async with cortex.client.get(f"{cortex.url}/api/keys", headers=headers) as response:
                return response.status

        async def keys_listed() -> bool:
            return await keys() == 200

        async with cortex.client.post(f"{cortex.url}/api/keys", json={"account_id": "a"}, headers=headers) as response:
            created_key = (await response.json())["key"]
        postgres.stop()
        try:
            async with cortex.client.get(f"{cortex.url}/api/keys", headers=headers) as response:
                error_body = await response.json()
                assert (response.status, response.headers["retry-after"]) == (503, "5")
                assert error_body["error"]["code"] == "service_unavailable"
            async with cortex.client.get(f"{cortex.url}/v1/models", headers={"x-api-key": created_key}) as response:
                assert response.status == 200
            async with cortex.client.get(f"{cortex.url}/v1/models", headers={"x-api-key": "other"}) as response:
                assert response.status == 401
        finally:
            postgres.start()
        await eventually(keys_listed)


async def test_readiness_check_names_the_ledger_while_its_database_is_read_only(
    postgres: Postgres, node: FakeNode
) -> None:
    settings = {
        "ledger": {"url": postgres.new_database()},
        "entitlements": {"keys": [{"key": "capped", "account_id": "acme", "hard_cap": 1_000_000}]},
    }
    headers = {"x-api-key": "capped"}
    async with running_cortex(node, settings=settings) as cortex:

        async def readiness() -> tuple[int, Any]:
            async with cortex.client.get(f"{cortex.url}/health/ready") as response:
                return response.status, await response.json()

        async def ready() -> bool:
            return (await readiness())[0] == 200

        async def chat() -> tuple[int, Any]:
            body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000}
            async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body, headers=headers) as response:
                return response.status, await response.json()

        ready_components = {name: {"ready": True} for name in ("gateway", "ledger", "nodes")}
        assert await readiness() == (200, {"ready": True, "components": ready_components})
        assert (await chat())[0] == 200
        postgres.set_read_only(True)
        try:
            await eventually(lambda: not cortex.gateway.ledger.available)
            not_ready = {"ready": False, "reason": "the ledger's database is not writable"}
            assert await readiness() == (503, {"ready": False, "components": {**ready_components, "ledger": not_ready}})
            assert (await cortex.get("/health"))["status"] == "ok"
            status, error_body = await chat()
            assert (status, error_body["error"]["code"]) == (503, "service_unavailable")
        finally:
            postgres.set_read_only(False)
        await eventually(ready)
        assert (await chat())[0] == 200


async def test_readiness_check_names_the_nodes_if_none_is_healthy(cortex: Cortex, node: FakeNode) -> None:
    node.down = True

    async def unready() -> bool:
        async with cortex.client.get(f"{cortex.url}/health/ready") as response:
            readiness = await response.json()
            return (response.status, readiness["components"]["nodes"]) == (
                503,
                {"ready": False, "reason": "none of 1 nodes is healthy"},
            )

    await eventually(unready)


async def test_readiness_check_names_a_ledger_whose_file_is_locked(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_TIMEOUT_SECS", 0.01)
    async with running_cortex(node) as cortex:

        async def ready() -> bool:
            async with cortex.client.get(f"{cortex.url}/health/ready") as response:
                readiness = await response.json()
                assert (response.status == 200) == readiness["components"]["ledger"]["ready"] == readiness["ready"]
                return readiness["ready"]

        async def unready() -> bool:
            return not await ready()

        assert await ready()
        lock_holder = sqlite3.connect(cortex.gateway.ledger._database._file, isolation_level=None)  # type: ignore[attr-defined]
        lock_holder.execute("BEGIN IMMEDIATE")
        await eventually(unready)
        assert (await cortex.get("/health"))["status"] == "ok"
        lock_holder.close()
        await eventually(ready)
