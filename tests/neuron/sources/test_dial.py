"""Hosts with several addresses: those that lead nowhere cost little, and failures keep their names."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from helexa.neuron.sources import dial
from helexa.neuron.sources.web import Site, WebError
from neuron.fake_hub import FakeHub

Place = tuple[str, int]


@pytest.fixture
def nowhere() -> Iterator[Place]:
    """An address that answers as little as one behind a firewall: so many wait there that it takes no more."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()


@pytest.fixture
def closed() -> Place:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()


@pytest.fixture
def lead(monkeypatch: pytest.MonkeyPatch):
    """Let all names have these addresses."""

    def lead(*places: Place) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]
        monkeypatch.setattr(dial.socket, "getaddrinfo", lambda *_, **__: list(found))

    return lead


def test_an_address_that_does_not_answer_is_not_waited_for(
    hub: FakeHub, nowhere: Place, closed: Place, lead, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dial, "_SECONDS", 60.0)  # who waits for the first waits too long
    lead(nowhere, closed, nowhere, ("127.0.0.1", int(hub.url.rpartition(":")[2])))
    with Site("http://hub.invalid", None, 3600.0).get("/api/models/org/tiny") as answer:
        assert b"siblings" in answer.text(1 << 20)


def test_when_no_address_answers_it_is_soon_said(nowhere: Place, lead, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dial, "_SECONDS", 0.3)
    lead(nowhere, nowhere)
    with pytest.raises(WebError, match=r"cannot be reached: no answer for 0\.3 s"):
        Site("http://hub.invalid", None, 3600.0).get("/")


def test_addresses_that_refuse_are_said_to(closed: Place, lead):
    lead(closed, closed)
    with pytest.raises(WebError, match="refuses connections: nothing listens there"):
        Site("http://hub.invalid", None, 3600.0).get("/")
