"""A gateway whose PostgreSQL goes away for a while."""

from cortex.fake_node import FakeNode
from cortex.postgres import Postgres
from cortex.running import eventually, running_cortex


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
