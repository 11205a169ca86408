"""A gateway whose PostgreSQL goes away for a while."""

import sqlite3
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.postgres import Postgres
from cortex.running import Cortex, eventually, running_cortex
from helexa.cortex.ledger.storage import sqlite


async def test_keys_stay_good_and_changes_are_refused_until_it_is_back(postgres: Postgres, node: FakeNode) -> None:
    entitlements = {"require_auth": True, "keys": [{"key": "root", "account_id": "ops", "role": "admin"}]}
    settings = {"ledger": {"url": postgres.new_database()}, "entitlements": entitlements}
    headers = {"x-api-key": "root"}
    async with running_cortex(node, settings=settings) as cortex:

        async def keys() -> int:
            async with cortex.client.get(f"{cortex.url}/api/keys", headers=headers) as response:
                return response.status

        async def back() -> bool:
            return await keys() == 200

        async with cortex.client.post(f"{cortex.url}/api/keys", json={"account_id": "a"}, headers=headers) as response:
            made = (await response.json())["key"]
        postgres.stop()
        try:
            async with cortex.client.get(f"{cortex.url}/api/keys", headers=headers) as response:
                answer = await response.json()
                assert (response.status, response.headers["retry-after"]) == (503, "5")
                assert answer["error"]["code"] == "service_unavailable"
            async with cortex.client.get(f"{cortex.url}/v1/models", headers={"x-api-key": made}) as response:
                assert response.status == 200
            async with cortex.client.get(f"{cortex.url}/v1/models", headers={"x-api-key": "other"}) as response:
                assert response.status == 401
        finally:
            postgres.start()
        await eventually(back)


async def test_readiness_names_the_ledger_while_its_database_is_read_only(postgres: Postgres, node: FakeNode) -> None:
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

        async def ask() -> tuple[int, Any]:
            body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100_000}
            async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body, headers=headers) as response:
                return response.status, await response.json()

        both = {"ledger": {"ready": True}, "nodes": {"ready": True}}
        assert await readiness() == (200, {"ready": True, "components": both})
        assert (await ask())[0] == 200
        postgres.set_read_only(True)
        try:
            await eventually(lambda: not cortex.gateway.ledger.available)
            broken = {"ready": False, "reason": "the ledger's database cannot be written"}
            assert await readiness() == (503, {"ready": False, "components": {**both, "ledger": broken}})
            assert (await cortex.get("/health"))["status"] == "ok"
            status, answer = await ask()
            assert (status, answer["error"]["code"]) == (503, "service_unavailable")
        finally:
            postgres.set_read_only(False)
        await eventually(ready)
        assert (await ask())[0] == 200


async def test_readiness_names_the_nodes_when_none_is_healthy(cortex: Cortex, node: FakeNode) -> None:
    node.down = True

    async def unready() -> bool:
        async with cortex.client.get(f"{cortex.url}/health/ready") as response:
            answer = await response.json()
            return (response.status, answer["components"]["nodes"]) == (
                503,
                {"ready": False, "reason": "none of 1 nodes is healthy"},
            )

    await eventually(unready)


async def test_readiness_names_a_ledger_whose_file_is_locked(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_TIMEOUT_SECS", 0.01)
    async with running_cortex(node) as cortex:

        async def ready() -> bool:
            async with cortex.client.get(f"{cortex.url}/health/ready") as response:
                answer = await response.json()
                assert (response.status == 200) == answer["components"]["ledger"]["ready"] == answer["ready"]
                return answer["ready"]

        async def unready() -> bool:
            return not await ready()

        assert await ready()
        other = sqlite3.connect(cortex.gateway.ledger._database._file, isolation_level=None)  # type: ignore[attr-defined]
        other.execute("BEGIN IMMEDIATE")
        await eventually(unready)
        assert (await cortex.get("/health"))["status"] == "ok"
        other.close()
        await eventually(ready)
