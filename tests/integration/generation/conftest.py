"""Fixtures of the library's tests: a small model in a private engine, and an environment without settings."""

from pathlib import Path

import pytest

import helexa
from cli.canned_gateway import CannedGateway
from generation.scripted_target import ScriptedTarget
from helexa.generation.background_event_loop import background


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Remove the library's environment variables, and skip the search for local servers."""
    monkeypatch.setattr("helexa.generation.target_choice.LOCAL_URLS", ())
    for name in ("BASE_URL", "API_KEY", "MODEL", "DEVICE", "NUM_PARALLEL", "FORCE_F32"):
        monkeypatch.delenv(f"HELEXA_{name}", raising=False)
        monkeypatch.delenv(f"CANDLE_{name}", raising=False)


@pytest.fixture(scope="session")
def small(smollm2_gguf: Path):
    """SmolLM2 with real weights, loaded once per test session."""
    with helexa.load(str(smollm2_gguf), target="private") as model:
        yield model


@pytest.fixture
def scripted():
    """Return a `ScriptedTarget`, and a model that uses this target."""
    target = ScriptedTarget()
    model = helexa.Model(target.location)
    background().targets._cached[target.location.key] = target
    return target, model


@pytest.fixture
def gateway():
    """A server whose responses are set by the test."""
    server = CannedGateway()
    yield server
    server.close()
