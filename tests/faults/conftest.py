"""A running stack that the tests of this folder may hurt; each leaves it serving."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.stack import Stack, free_port
from faults import bad_models

AWAY = "org/away"
HALF = "org/half"


@pytest.fixture(scope="session")
def half(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file of which only the first half arrived."""
    return bad_models.truncated(smollm2_gguf, tmp_path_factory.mktemp("models") / "half.gguf")


@pytest.fixture(scope="session")
def stack(smollm2_gguf: Path, half: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    hub = f'[harness.torch.sources.away]\nendpoint = "http://127.0.0.1:{free_port()}"\n'
    catalogue = (
        f'[[models]]\nid = "{AWAY}"\nsource = "away:{AWAY}"\n[[models]]\nid = "{HALF}"\nsource = "file:{half}"\n'
    )
    folder = tmp_path_factory.mktemp("hurt")
    with Stack(smollm2_gguf, folder, node_config=hub, catalogue=catalogue) as stack:
        yield stack
