"""A running stack for tests that break parts of it. Each test leaves the stack in service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.stack import Stack
from faults import bad_models
from neuron.fake_hub import FakeHub
from ports import free_port

AWAY = "org/away"
GONE = "org/gone"
HALF = "org/half"


@pytest.fixture(scope="session")
def half(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first half of a model file."""
    return bad_models.truncated(smollm2_gguf, tmp_path_factory.mktemp("models") / "half.gguf")


@pytest.fixture(scope="session")
def hub() -> Iterator[FakeHub]:
    """A hub with one repository, `hub:org/small`."""
    hub = FakeHub()
    hub.repositories["org/small"] = {"small-Q8_0.gguf": bytes(range(256)) * 100}
    hub.start()
    yield hub
    hub.stop()


@pytest.fixture(scope="session")
def stack(smollm2_gguf: Path, half: Path, hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    hubs = f'[harness.torch.sources.away]\nendpoint = "http://127.0.0.1:{free_port()}"\n'
    hubs += f'[harness.torch.sources.hub]\nendpoint = "{hub.url}"\ncache_dir = "{tmp_path_factory.mktemp("hub")}"\n'
    sources = {AWAY: f"away:{AWAY}", GONE: f"hub:{GONE}", HALF: f"file:{half}"}
    catalog = "".join(f'[[models]]\nid = "{name}"\nsource = "{source}"\n' for name, source in sources.items())
    folder = tmp_path_factory.mktemp("hurt")
    with Stack(smollm2_gguf, folder, node_config=hubs, catalog=catalog) as stack:
        yield stack
