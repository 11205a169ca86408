"""The admin API `/api/keys`, over a real socket and a real database."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex
from helexa.core.catalog import Catalog
from helexa.core.errors import ApiError, ConfigError
from helexa.cortex.config import CortexConfig

ROOT, USER = "root-secret", "user-secret"
ENTITLEMENTS = {
    "keys": [
        {"key": ROOT, "account_id": "ops", "role": "admin"},
        {"key": USER, "account_id": "alice", "hard_cap": 5},
    ]
}


class Api:
    """A client of a gateway's admin API."""

    def __init__(self, cortex: Cortex) -> None:
        self.cortex = cortex

    async def __call__(
        self, method: str, path: str = "/api/keys", body: Any = None, secret: str | None = ROOT
    ) -> tuple[int, Any]:
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = self.cortex.client.request(method, self.cortex.url + path, data=data, headers=headers)
        async with request as response:
            return response.status, await response.json()


@pytest.fixture
async def api(node: FakeNode) -> AsyncIterator[Api]:
    async with running_cortex(node, settings={"entitlements": ENTITLEMENTS}, aliases={"small": "Org/M"}) as cortex:
        yield Api(cortex)


def admitted(api: Api, secret: str) -> Any:
    return api.cortex.gateway.authenticator.admit([(b"x-api-key", secret.encode())])


async def test_api_key_is_created_changed_and_revoked_through_the_key_endpoints(api: Api) -> None:
    body = {
        "account_id": "bob",
        "key_id": "bob-1",
        "models": ["small", "Org/X"],
        "hard_cap": 100,
        "window": {"kind": "rolling", "seconds": 60},
        "requests_per_minute": 5,
        "expires_at": time.time() + 1000,
    }
    status, created = await api("POST", body=body)
    assert status == 201
    secret = created.pop("key")
    assert secret.startswith("hlx_") and created["hint"] == secret[:8]
    assert created | {"models": None} == created | body | {"models": None}
    assert (created["models"], created["role"], created["concurrency"]) == (["Org/M", "Org/X"], "user", None)
    assert admitted(api, secret).models == {"Org/M", "Org/X"}

    status, response = await api("GET")
    assert status == 200
    assert [key["key_id"] for key in response["keys"]] == ["ops", "alice", "bob-1"]
    assert response["keys"][2] == created
    assert not any(word in json.dumps(response) for word in (secret, ROOT, USER))

    status, changed = await api("PATCH", "/api/keys/bob-1", {"hard_cap": None, "concurrency": 2, "models": None})
    assert (status, changed) == (200, created | {"hard_cap": None, "concurrency": 2, "models": None})
    assert admitted(api, secret).concurrency == 2

    for _ in range(2):
        status, revoked = await api("DELETE", "/api/keys/bob-1")
        assert status == 200
        assert revoked == changed | {"revoked_at": revoked["revoked_at"]}
    with pytest.raises(ApiError, match="revoked"):
        admitted(api, secret)
    assert (await api("POST", body=body))[0] == 409


async def test_api_keys_created_without_an_id_get_unique_ids(api: Api) -> None:
    created = [(await api("POST", body={"account_id": "bob"}))[1] for _ in range(3)]
    assert len({key["key_id"] for key in created}) == 3
    assert all(key["key_id"].startswith("bob-") for key in created)
    assert [admitted(api, key["key"]).account_id for key in created] == ["bob"] * 3


async def test_key_list_shows_spent_tokens(api: Api) -> None:
    _, created = await api("POST", body={"account_id": "bob", "key_id": "bob", "hard_cap": 10**6})
    assert (created["spent"], created["window_ends_at"]) == (0, None)
    body = json.dumps({"model": "small", "messages": []}).encode()
    assert (await api("POST", "/v1/chat/completions", body, created["key"]))[0] == 200
    _, response = await api("GET")
    assert response["keys"][2]["spent"] == 9


async def test_key_list_requires_a_key_and_shows_a_user_only_keys_of_the_same_account(api: Api) -> None:
    for secret in (None, "placeholder"):
        assert (await api("GET", "/api/keys", secret=secret))[0] == 401
    await api("POST", "/api/keys", {"account_id": "bob"})
    code, response = await api("GET", "/api/keys", secret=USER)
    accounts = {key["account_id"] for key in response["keys"]}
    assert code == 200 and len(accounts) == 1 and "bob" not in accounts


async def test_endpoints_that_change_keys_require_an_admin_key(api: Api) -> None:
    _, created = await api("POST", body={"account_id": "bob", "role": "admin"})
    for method, path in (
        ("POST", "/api/keys"),
        ("PATCH", "/api/keys/x"),
        ("DELETE", "/api/keys/x"),
    ):
        for secret, status in ((None, 401), ("placeholder", 401), (USER, 403)):
            code, response = await api(method, path, {"account_id": "eve", "role": "admin"}, secret)
            assert code == status
            assert response["error"]["code"] in ("invalid_api_key", "admin_only")
    assert (await api("GET", secret=created["key"]))[0] == 200
    assert (await api("DELETE", f"/api/keys/{created['key_id']}", secret=created["key"]))[0] == 200
    assert (await api("GET", secret=created["key"]))[0] == 401


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"\xff", 400, None),
        ([], 400, None),
        ({}, 400, "account_id"),
        ({"account_id": ""}, 400, "account_id"),
        ({"account_id": "a b"}, 400, "account_id"),
        ({"account_id": "a\nb"}, 400, "account_id"),
        ({"account_id": "a", "key_id": "../x"}, 400, "key_id"),
        ({"account_id": "a", "hard_cap": -1}, 400, "hard_cap"),
        ({"account_id": "a", "hard_cap": 2**63}, 400, "hard_cap"),
        ({"account_id": "a", "hard_cap": "5"}, 400, "hard_cap"),
        ({"account_id": "a", "concurrency": 0}, 400, "concurrency"),
        ({"account_id": "a", "window": {"kind": "rolling"}}, 400, "window"),
        ({"account_id": "a", "window": None}, 400, "window"),
        ({"account_id": "a", "models": [""]}, 400, "models.0"),
        ({"account_id": "a", "role": "god"}, 400, "role"),
        ({"account_id": "a", "expires_at": 5}, 400, "expires_at"),
        ({"account_id": "a", "key": "my own"}, 400, "key"),
        ({"account_id": "a", "key_id": "alice"}, 409, "key_id"),
    ],
)
async def test_request_for_an_invalid_key_is_rejected_and_creates_no_key(
    api: Api, body: Any, status: int, param: str | None
) -> None:
    code, response = await api("POST", body=body)
    assert (code, response["error"]["param"]) == (status, param)
    assert (await api("GET"))[1]["keys"][2:] == []


async def test_changes_of_unknown_or_static_keys_and_of_fixed_fields_are_rejected(api: Api) -> None:
    assert (await api("PATCH", "/api/keys/nobody", {}))[0] == 404
    assert (await api("DELETE", "/api/keys/nobody"))[0] == 404
    for method in ("PATCH", "DELETE"):
        status, response = await api(method, "/api/keys/alice", {})
        assert (status, response["error"]["code"]) == (409, "static_key")
    await api("POST", body={"account_id": "bob", "key_id": "bob"})
    for body in ({"account_id": "eve"}, {"role": "admin"}, {"revoked_at": None}, {"hard_cap": 1.5}):
        assert (await api("PATCH", "/api/keys/bob", body))[0] == 400
    assert (await api("POST", body=b'{"account_id": "' + b"x" * (256 << 10) + b'"}'))[0] == 413


async def test_reload_that_would_open_the_gateway_to_the_network_without_keys_is_rejected(node: FakeNode) -> None:
    settings = {"gateway": {"listen": "0.0.0.0:1"}, "entitlements": {**ENTITLEMENTS, "require_auth": True}}
    async with running_cortex(node, settings=settings) as cortex:
        loopback = CortexConfig.model_validate(
            {"entitlements": ENTITLEMENTS}
        )  # without `listen`, whose default is a loopback address
        with pytest.raises(ConfigError, match="--insecure"):
            cortex.gateway.configure(loopback, Catalog())
        assert (await Api(cortex)("GET", "/v1/models", secret=None))[0] == 401
        twice = {"require_auth": True, "keys": [*ENTITLEMENTS["keys"], ENTITLEMENTS["keys"][0]]}
        with pytest.raises(ConfigError, match="same key as an earlier entry"):
            cortex.gateway.configure(CortexConfig.model_validate({"entitlements": twice}), Catalog())
        fewer = {"require_auth": True, "keys": ENTITLEMENTS["keys"][:1]}
        cortex.gateway.configure(CortexConfig.model_validate({"entitlements": fewer}), Catalog())
        assert (await Api(cortex)("GET", "/v1/models"))[0] == 200
        assert (await Api(cortex)("GET", "/v1/models", secret=USER))[0] == 401


async def test_405_response_of_the_key_endpoints_lists_the_allowed_methods(api: Api) -> None:
    for path, methods in (("/api/keys", {"GET", "HEAD", "POST"}), ("/api/keys/alice", {"PATCH", "DELETE"})):
        async with api.cortex.client.put(api.cortex.url + path) as response:
            assert response.status == 405
            assert set(response.headers["allow"].split(", ")) == methods
    async with api.cortex.client.head(f"{api.cortex.url}/api/keys") as response:
        assert response.status == 401
