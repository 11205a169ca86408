"""One small model in a private engine for all tests of the library, and an environment that says nothing."""

from pathlib import Path

import pytest

import helexa
from cli.canned_gateway import CannedGateway
from generation.scripted_target import ScriptedTarget
from helexa.generation.background import background


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No variable says anything, and no server of this machine is asked."""
    monkeypatch.setattr("helexa.generation.targets._LOCAL_URLS", ())
    for name in ("BASE_URL", "API_KEY", "MODEL", "DEVICE", "NUM_PARALLEL", "FORCE_F32"):
        monkeypatch.delenv(f"HELEXA_{name}", raising=False)
        monkeypatch.delenv(f"CANDLE_{name}", raising=False)


@pytest.fixture(scope="session")
def small(smollm2_gguf: Path):
    """SmolLM2 with real weights, loaded once."""
    with helexa.load(str(smollm2_gguf), target="private") as model:
        yield model


@pytest.fixture
def scripted():
    """A model whose target does what a test says."""
    target = ScriptedTarget()
    model = helexa.Model(target.place)
    background().targets._found[target.place.key] = target
    return target, model


@pytest.fixture
def gateway():
    """A server whose answers a test chooses."""
    server = CannedGateway()
    yield server
    server.close()
