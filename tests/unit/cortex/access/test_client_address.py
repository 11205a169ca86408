"""The address of a client, directly and behind reverse proxies."""

from ipaddress import ip_network

import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import eventually, running_cortex
from helexa.cortex.access.proxies_exposure_and_cors import TrustedProxies

PROXIES = ["127.0.0.1", "10.0.0.0/8", "fd00::/8"]


@pytest.mark.parametrize(
    ("peer", "headers", "expected"),
    [
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.7"], "203.0.113.7"),
        ("192.0.2.1", ["203.0.113.7"], "192.0.2.1"),  # not a trusted proxy
        ("10.0.0.1", ["198.51.100.1, 203.0.113.7"], "203.0.113.7"),  # the client sent the first address
        ("10.0.0.1", ["203.0.113.7, 10.0.0.2", "10.0.0.3"], "203.0.113.7"),
        ("10.0.0.1", ["10.0.0.9"], "10.0.0.9"),
        ("10.0.0.1", ["203.0.113.7, nonsense"], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.7, nonsense, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["203.0.113.7:4711"], "203.0.113.7"),
        ("10.0.0.1", ["[2001:db8::1]:4711"], "2001:db8::1"),
        ("fd00::1", ["2001:DB8:0::1"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["203.0.113.7"], "203.0.113.7"),
        ("10.0.0.1", ["unknown"], "10.0.0.1"),
        ("10.0.0.1", [""], "10.0.0.1"),
        ("", ["203.0.113.7"], ""),
    ],
)
def test_client_address_is_the_last_forwarded_address_that_is_no_trusted_proxy(
    peer: str, headers: list[str], expected: str
) -> None:
    proxies = TrustedProxies([ip_network(proxy) for proxy in PROXIES])
    scope = {
        "client": (peer, 1) if peer else None,
        "headers": [(b"x-forwarded-for", value.encode()) for value in headers],
    }
    assert proxies.client(scope) == expected


def test_without_trusted_proxies_x_forwarded_for_has_no_effect() -> None:
    scope = {"client": ("127.0.0.1", 1), "headers": [(b"x-forwarded-for", b"203.0.113.7")]}
    assert TrustedProxies([]).client(scope) == "127.0.0.1"


@pytest.mark.parametrize(("trusted", "expected"), [(["127.0.0.0/8"], "203.0.113.7"), ([], "127.0.0.1")])
async def test_activity_log_has_the_address_of_the_client(node: FakeNode, trusted: list[str], expected: str) -> None:
    async with running_cortex(node, settings={"gateway": {"trusted_proxies": trusted}}) as cortex:
        body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}]}
        headers = {"x-forwarded-for": "203.0.113.7"}
        async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200

        async def is_logged() -> bool:
            rows = (await cortex.get("/api/activity"))["requests"]
            assert all(row["client"] == expected for row in rows)
            return len(rows) == 1

        await eventually(is_logged)
