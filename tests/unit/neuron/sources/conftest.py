"""Fixtures: a fake hub, a node that downloads from it, and retry pauses that take no time."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from helexa.neuron.sources.fetch_and_errors import Fetch
from neuron.fake_hub import FakeHub
from neuron.sources.hub_node import FILE, NAME, WEIGHTS, Node


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    hub.repositories[NAME] = {FILE: WEIGHTS}
    hub.repositories["org/dense"] = {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {str(number): f"model-{number}.safetensors" for number in range(6)}}
        ).encode(),
        **{f"model-{number}.safetensors": b"%d" % number * 50_000 for number in range(6)},
    }
    hub.start()
    yield hub
    hub.stop()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of pauses between attempts in seconds, and make each pause take 1 ms."""
    requested: list[float] = []
    wait = Fetch.wait

    def shortly(fetch: Fetch, seconds: float) -> None:
        requested.append(seconds)
        wait(fetch, 0.001)

    monkeypatch.setattr(Fetch, "wait", shortly)
    return requested


@pytest.fixture
def node(hub: FakeHub, tmp_path: Path) -> Node:
    return Node(hub, tmp_path / "hub")
