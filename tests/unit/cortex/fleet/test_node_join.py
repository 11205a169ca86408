"""Nodes that join with an invitation: who may join, and to which addresses the gateway connects."""

import asyncio
import json
from collections.abc import AsyncIterator
from ipaddress import ip_network
from typing import Any

import pytest
from pydantic import SecretStr

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.core.errors import ApiError
from helexa.cortex.config import NeuronSection
from helexa.cortex.ledger.keys_and_nodes import Invitation
from helexa.cortex.node_join import ATTEMPTS_PER_MINUTE, FailedAttempts, allowed_endpoint
from ports import free_port

KEY = "key-of-the-node"
ROOT = {"authorization": "Bearer root"}
KEYS = [{"key": "root", "account_id": "root", "role": "admin"}, {"key": "user", "account_id": "user"}]
SETTINGS = {"entitlements": {"require_auth": True, "keys": KEYS}}


@pytest.fixture
async def gateway() -> AsyncIterator[Cortex]:
    """A gateway that requires keys and has no nodes."""
    async with running_cortex(settings=SETTINGS) as cortex:
        yield cortex


@pytest.fixture
async def joining() -> AsyncIterator[FakeNode]:
    """A node that requires the key `KEY`."""
    async with FakeNode(name="new", key=KEY).holds("Org/M").serving() as node:
        yield node


async def send(cortex: Cortex, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    async with cortex.client.request(method, cortex.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def invite(cortex: Cortex, **fields: Any) -> str:
    status, body = await send(cortex, "POST", "/api/invitations", fields, **ROOT)
    assert status == 201
    return body["token"]


async def join(cortex: Cortex, token: str, url: str, name: str = "new", key: str = KEY) -> tuple[int, Any]:
    return await send(cortex, "POST", "/api/join", {"token": token, "name": name, "url": url, "key": key})


async def names(cortex: Cortex) -> list[tuple[str, str]]:
    _, body = await send(cortex, "GET", "/api/nodes", **ROOT)
    return [(node["name"], node["source"]) for node in body["nodes"]]


async def test_node_that_joined_with_an_invitation_serves_requests(gateway: Cortex, joining: FakeNode) -> None:
    token = await invite(gateway)
    assert await join(gateway, token, joining.url) == (201, {"name": "new", "endpoint": joining.url})
    assert await names(gateway) == [("new", "joined")]
    await eventually(lambda: gateway.gateway.fleet.view().knows("Org/M"))
    body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}]}
    status, _ = await send(gateway, "POST", "/v1/chat/completions", body, **ROOT)
    assert status == 200
    assert await gateway.sample("cortex_node_joins_total", outcome="joined") == 1


async def test_join_token_is_rejected_at_its_second_use(gateway: Cortex, joining: FakeNode) -> None:
    token = await invite(gateway)
    outcomes = await asyncio.gather(*(join(gateway, token, joining.url, f"n{number}") for number in range(4)))
    statuses = sorted(status for status, _ in outcomes)
    assert statuses[0] == 201
    assert set(statuses[1:]) <= {403, 409}  # the token is used, or the address is taken
    assert len(await names(gateway)) == 1
    assert (await join(gateway, token, joining.url))[1]["error"]["code"] == "invalid_invitation"


async def test_failed_join_does_not_use_up_the_token(gateway: Cortex, joining: FakeNode) -> None:
    token = await invite(gateway)
    status, body = await join(gateway, token, f"http://127.0.0.1:{free_port()}")
    assert (status, body["error"]["code"]) == (422, "node_not_verified")
    assert "start the node" in body["error"]["message"]
    assert (await join(gateway, token, joining.url))[0] == 201


@pytest.mark.parametrize("key", ["another-key", None])
async def test_node_that_does_not_require_its_announced_key_cannot_join(
    gateway: Cortex, joining: FakeNode, key: str | None
) -> None:
    joining.key = key
    status, body = await join(gateway, await invite(gateway), joining.url)
    assert (status, body["error"]["code"]) == (422, "node_not_verified")
    assert ("requires no key" if key is None else "does not accept the API key") in body["error"]["message"]
    assert KEY not in json.dumps(body)
    assert await names(gateway) == []


async def test_join_with_an_expired_invitation_is_rejected(gateway: Cortex, joining: FakeNode) -> None:
    store = gateway.gateway.node_store
    _, token = await store.invite(-1.0)
    assert (await join(gateway, token.get_secret_value(), joining.url))[0] == 403


async def test_invitation_can_determine_the_name_of_the_node(gateway: Cortex, joining: FakeNode) -> None:
    token = await invite(gateway, name="beast")
    status, body = await join(gateway, token, joining.url)
    assert (status, body["error"]["code"]) == (403, "name_not_allowed")
    assert (await join(gateway, token, joining.url, "beast"))[0] == 201


@pytest.mark.parametrize("name", ["", "-x", "a/b", "../x", "a b", "x" * 64, "é"])
async def test_join_with_an_unusable_node_name_is_rejected(gateway: Cortex, joining: FakeNode, name: str) -> None:
    assert (await join(gateway, await invite(gateway), joining.url, name))[0] == 400


async def test_join_with_the_name_or_address_of_a_configured_node_is_rejected(joining: FakeNode) -> None:
    async with FakeNode(name="n1").serving() as configured, running_cortex(configured, settings=SETTINGS) as cortex:
        token = await invite(cortex)
        for name, url in (("n1", joining.url), ("new", configured.url)):
            status, body = await join(cortex, token, url, name)
            assert (status, body["error"]["code"]) == (409, "node_exists")
        assert (await send(cortex, "DELETE", "/api/nodes/n1", **ROOT))[1]["error"]["code"] == "static_node"
        assert (await join(cortex, token, joining.url))[0] == 201
        assert await names(cortex) == [("n1", "config"), ("new", "joined")]


@pytest.mark.parametrize("name", ["new", "renamed"])
async def test_joined_node_that_is_also_configured_is_listed_once(
    gateway: Cortex, joining: FakeNode, name: str
) -> None:
    """The administrator writes a node that joined into cortex.toml, with its name or another one."""
    await join(gateway, await invite(gateway), joining.url)
    section = NeuronSection(name=name, endpoint=joining.url, bearer=SecretStr(KEY))
    config = gateway.gateway.config.model_copy(update={"neurons": [section]})
    gateway.gateway.configure(config, gateway.gateway.catalog)
    assert await names(gateway) == [(name, "config")]
    assert (await send(gateway, "DELETE", "/api/nodes/new", **ROOT))[0] == 200  # forgets the node that joined
    assert await names(gateway) == [(name, "config")]
    assert (await send(gateway, "DELETE", f"/api/nodes/{name}", **ROOT))[1]["error"]["code"] == "static_node"


async def test_joined_node_that_was_removed_gets_no_requests(gateway: Cortex, joining: FakeNode) -> None:
    await join(gateway, await invite(gateway), joining.url)
    assert (await send(gateway, "DELETE", "/api/nodes/new", authorization="Bearer user"))[0] == 403
    assert await send(gateway, "DELETE", "/api/nodes/new", **ROOT) == (200, {"name": "new", "removed": True})
    assert await names(gateway) == []
    assert (await send(gateway, "DELETE", "/api/nodes/new", **ROOT))[0] == 404
    assert (await join(gateway, await invite(gateway), joining.url))[0] == 201


async def test_joined_node_survives_a_restart_and_reload_of_the_gateway(joining: FakeNode, tmp_path: Any) -> None:
    settings = SETTINGS | {"ledger": {"url": f"sqlite:{tmp_path}/cortex.db"}}
    async with running_cortex(settings=settings) as cortex:
        await join(cortex, await invite(cortex), joining.url)
        cortex.gateway.configure(cortex.gateway.config, cortex.gateway.catalog)
        assert await names(cortex) == [("new", "joined")]
    async with running_cortex(settings=settings, ready=False) as cortex:
        assert await names(cortex) == [("new", "joined")]
        assert cortex.gateway.fleet.bearer("new") == KEY


async def test_nodes_that_joined_at_one_gateway_are_used_by_all_gateways_of_the_database(
    gateway: Cortex, joining: FakeNode
) -> None:
    """The command line and other gateways change the database without this gateway."""
    store = gateway.gateway.node_store
    invitation, _ = await store.invite(60)
    await store.add(invitation, "far", joining.url, SecretStr(KEY))
    await eventually(lambda: [node.name for node in gateway.gateway.fleet.view().nodes] == ["far"])
    await store.remove("far")
    await eventually(lambda: not gateway.gateway.fleet.view().nodes)


async def test_joins_with_wrong_tokens_are_counted_and_rejected_above_a_rate_limit(
    gateway: Cortex, joining: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(ATTEMPTS_PER_MINUTE):
        assert (await join(gateway, "hlxjoin_wrong", joining.url))[0] == 403
    assert (await join(gateway, await invite(gateway), joining.url))[0] == 429
    assert await gateway.sample("cortex_node_joins_total", outcome="wrong_token") == ATTEMPTS_PER_MINUTE
    assert await gateway.sample("cortex_node_joins_total", outcome="limited") == 1
    assert caplog.text.count("node did not join") == ATTEMPTS_PER_MINUTE
    assert joining.polled_paths == []


def test_limit_of_failed_joins_refills_with_time_and_counts_by_network() -> None:
    now = [0.0]
    attempts = FailedAttempts(lambda: now[0])
    for number in range(ATTEMPTS_PER_MINUTE):
        attempts.failed(f"2001:db8::{number}")
    attempts.check("2001:db8:1::1")
    with pytest.raises(ApiError) as limited:
        attempts.check("2001:db8::ffff")
    assert limited.value.retry_after == 6
    now[0] = 6.0
    attempts.check("2001:db8::ffff")
    for number in range(5000):
        attempts.failed(f"10.0.{number >> 8}.{number & 255}")
    assert len(attempts._failures) == 4096


async def test_join_through_an_unknown_proxy_is_rejected(gateway: Cortex, joining: FakeNode) -> None:
    """Otherwise all nodes would seem to join from the proxy, and could announce the addresses of the proxy's host."""
    body = {"token": await invite(gateway), "name": "new", "url": joining.url, "key": KEY}
    headers = {"x-forwarded-for": "10.0.0.5"}
    status, answer = await send(gateway, "POST", "/api/join", body, **headers)
    assert (status, answer["error"]["code"]) == (400, "untrusted_proxy")
    assert joining.polled_paths == []


@pytest.mark.parametrize(("client", "status"), [("127.0.0.1", 201), ("10.0.0.5", 400)])
async def test_address_of_a_joining_node_is_read_from_a_trusted_proxy(
    joining: FakeNode, client: str, status: int
) -> None:
    settings = SETTINGS | {"gateway": {"trusted_proxies": ["127.0.0.1"]}}
    async with running_cortex(settings=settings) as cortex:
        body = {"token": await invite(cortex), "name": "new", "url": joining.url, "key": KEY}
        headers = {"x-forwarded-for": client}
        assert (await send(cortex, "POST", "/api/join", body, **headers))[0] == status


async def test_tokens_and_keys_of_joining_nodes_are_not_logged(
    gateway: Cortex, joining: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(0):
        token = await invite(gateway)
        await join(gateway, token, f"http://127.0.0.1:{free_port()}")
        await join(gateway, token, joining.url)
    assert "node joined node=new" in caplog.text
    assert token not in caplog.text
    assert KEY not in caplog.text


def invitation(*networks: str) -> Invitation:
    return Invitation(b"", "", None, tuple(map(ip_network, networks)), 0.0)


@pytest.mark.parametrize(
    ("url", "client", "networks", "problem"),
    [
        ("http://10.0.0.5:13131", "10.0.0.5", [], None),
        ("http://10.0.0.5:13131", "::ffff:10.0.0.5", [], None),
        ("http://[fd00::5]:13131", "fd00::5", [], None),
        ("http://localhost:13131", "127.0.0.1", [], None),
        ("http://10.0.0.6:13131", "10.0.0.5", [], "not 10.0.0.5, the address from which"),
        ("http://10.0.0.6:13131", "10.0.0.5", ["10.0.0.0/24"], None),
        ("http://10.0.1.6:13131", "10.0.0.5", ["10.0.0.0/24"], "not 10.0.0.5"),
        ("http://127.0.0.1:13131", "10.0.0.5", [], "not 10.0.0.5"),
        ("http://169.254.169.254", "169.254.169.254", ["0.0.0.0/0"], "not the address of a machine"),
        ("http://0.0.0.0:80", "0.0.0.0", ["0.0.0.0/0"], "not the address of a machine"),
        ("http://8.8.8.8:13131", "8.8.8.8", [], "public address"),
        ("http://8.8.8.8:13131", "8.8.8.8", ["8.8.8.8"], None),
        ("https://8.8.8.8:13131", "8.8.8.8", [], None),
        ("http://10.0.0.5:13131/admin", "10.0.0.5", [], "has a path"),
        ("http://no-such-host.invalid:13131", "10.0.0.5", [], "cannot resolve this host"),
    ],
)
async def test_gateway_connects_only_to_the_address_from_which_a_node_joins(
    url: str, client: str, networks: list[str], problem: str | None
) -> None:
    if problem is not None:
        with pytest.raises(ApiError, match=problem):
            await allowed_endpoint(url, client, invitation(*networks))
    else:
        endpoint = await allowed_endpoint(url, client, invitation(*networks))
        assert endpoint == url.replace("localhost", endpoint.split("/")[2].rpartition(":")[0])
        assert "localhost" not in endpoint
