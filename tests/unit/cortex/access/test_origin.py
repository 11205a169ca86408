"""Origin and Host checks of a gateway without keys, over real sockets."""

from typing import Any

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, running_cortex
from helexa.core.address import is_loopback

PAGE, FOREIGN = "https://chat.example", "https://evil.example"
KEYS = {"keys": [{"key": "mine", "account_id": "a"}]}


async def chat(cortex: Cortex, **headers: str) -> tuple[int, str | None]:
    """Send a chat; return its status and error code."""
    body = '{"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}]}'
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", data=body, headers=headers) as response:
        return response.status, (await response.json()).get("error", {}).get("code")


@pytest.mark.parametrize("origin", [FOREIGN, "null", "http://127.0.0.1:1", "http://localhost.evil.example", ""])
async def test_request_from_a_web_page_of_a_foreign_origin_is_rejected(
    cortex: Cortex, node: FakeNode, origin: str
) -> None:
    allowed = (200, None) if not origin else (403, "origin_not_allowed")
    assert await chat(cortex, origin=origin) == allowed
    assert len(node.bodies) == (not origin)
    assert await chat(cortex) == (200, None)


async def test_request_from_a_web_page_of_the_gateways_own_origin_is_allowed(cortex: Cortex) -> None:
    assert await chat(cortex, origin=cortex.url) == (200, None)
    port = cortex.url.rpartition(":")[2]
    assert await chat(cortex, origin=f"http://LocalHost:{port}", host=f"localhost:{port}") == (200, None)
    assert await chat(cortex, origin="http://localhost", host=f"localhost:{port}") == (403, "origin_not_allowed")
    assert await chat(cortex, origin="http://localhost", host="localhost") == (200, None)


@pytest.mark.parametrize("origins", [[PAGE], [f"{PAGE}/"], ["*"]])
async def test_requests_from_web_pages_of_configured_origins_are_allowed(node: FakeNode, origins: list[str]) -> None:
    async with running_cortex(node, settings={"gateway": {"cors_origins": origins}}) as cortex:
        assert await chat(cortex, origin=PAGE) == (200, None)
        expected = (200, None) if origins == ["*"] else (403, "origin_not_allowed")
        assert await chat(cortex, origin=FOREIGN) == expected


async def test_request_with_a_valid_key_skips_origin_and_host_checks(node: FakeNode) -> None:
    async with running_cortex(node, settings={"entitlements": KEYS}) as cortex:
        assert await chat(cortex, origin=FOREIGN, authorization="Bearer mine") == (200, None)
        assert await chat(cortex, host="gw.example", **{"x-api-key": "mine"}) == (200, None)
        assert await chat(cortex, origin=FOREIGN, authorization="Bearer other") == (403, "origin_not_allowed")
        both = {"authorization": "Bearer mine", "x-api-key": "other"}
        assert await chat(cortex, origin=FOREIGN, **both) == (200, None)


async def test_gateway_that_requires_keys_does_not_check_origins(node: FakeNode) -> None:
    settings = {"entitlements": KEYS | {"require_auth": True}}
    async with running_cortex(node, settings=settings) as cortex:
        assert await chat(cortex, origin=FOREIGN, host="gw.example") == (401, "invalid_api_key")
        assert await chat(cortex, origin=FOREIGN, host="gw.example", authorization="Bearer mine") == (200, None)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:31313", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:31313", "127.1.2.3:8"),
        *("localhost.:9", "host.docker.internal:31313", "host.containers.internal", "node.localhost"),
    ],
)
async def test_host_headers_that_name_a_loopback_address_are_allowed(node: FakeNode, host: str) -> None:
    async with running_cortex(node, settings={"gateway": {"listen": "127.1.2.3:0"}}) as cortex:
        assert await chat(cortex, host=host) == (200, None)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:31313", "localhost.evil.example", "127.0.0.1.evil.example", "::1", "[::2]"),
        *("internal", "host.docker.internal.evil.example"),
    ],
)
async def test_foreign_host_header_is_rejected(cortex: Cortex, node: FakeNode, host: str) -> None:
    assert await chat(cortex, host=host) == (403, "host_not_allowed")
    assert await chat(cortex, host=host, origin=f"http://{host}") == (403, "host_not_allowed")
    assert node.bodies == []


@pytest.mark.parametrize("gateway", [{"listen": "192.0.2.1:0"}, {}])
async def test_insecure_gateway_allows_any_host_header(node: FakeNode, gateway: dict[str, Any]) -> None:
    async with running_cortex(node, settings={"gateway": gateway | {"insecure": True}}) as cortex:
        assert await chat(cortex, host="gw.example") == (200, None)
        assert await chat(cortex, host="gw.example", origin="http://gw.example") == (200, None)
        assert await chat(cortex, host="gw.example", origin=FOREIGN) == (403, "origin_not_allowed")


def test_only_addresses_of_this_machine_are_loopback() -> None:
    assert [is_loopback(host) for host in ("127.8.9.1", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "beast", "10.0.0.1")] == [False] * 4
