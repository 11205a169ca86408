"""Connections to hosts with several addresses: unreachable addresses cost little time, and errors name the cause."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from helexa.neuron.sources import hub_http_client
from helexa.neuron.sources.hub_http_client import Site, WebError
from neuron.fake_hub import FakeHub

Address = tuple[str, int]


@pytest.fixture
def unresponsive() -> Iterator[Address]:
    """Return an address that does not respond, because its backlog is full, like an address behind a firewall."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()


@pytest.fixture
def closed() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()


@pytest.fixture
def resolve_to(monkeypatch: pytest.MonkeyPatch):
    """Return `resolve_to(*addresses)`, which makes all host names resolve to `addresses`."""

    def resolve_to(*places: Address) -> None:
        results = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]
        monkeypatch.setattr(hub_http_client.socket, "getaddrinfo", lambda *_, **__: list(results))

    return resolve_to


def test_unresponsive_address_of_the_hub_does_not_delay_the_next_address(
    hub: FakeHub, unresponsive: Address, closed: Address, resolve_to, monkeypatch: pytest.MonkeyPatch
):
    # Waiting for the first address would exceed the test's timeout.
    monkeypatch.setattr(hub_http_client, "_CONNECT_SECONDS", 60.0)
    resolve_to(unresponsive, closed, unresponsive, ("127.0.0.1", int(hub.url.rpartition(":")[2])))
    with Site("http://hub.invalid", None, 3600.0).get("/api/models/org/tiny") as response:
        assert b"siblings" in response.text(1 << 20)


def test_connection_error_follows_soon_if_no_address_of_the_hub_responds(
    unresponsive: Address, resolve_to, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub_http_client, "_CONNECT_SECONDS", 0.3)
    resolve_to(unresponsive, unresponsive)
    with pytest.raises(WebError, match=r"cannot be reached: no response for 0\.3 s"):
        Site("http://hub.invalid", None, 3600.0).get("/")


def test_connection_error_names_refused_connections(closed: Address, resolve_to):
    resolve_to(closed, closed)
    with pytest.raises(WebError, match="refuses connections: nothing listens there"):
        Site("http://hub.invalid", None, 3600.0).get("/")
