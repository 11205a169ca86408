"""A node's model sources with one hub."""

import asyncio
from pathlib import Path

import pytest

from helexa.core.errors import SourceError
from helexa.core.model_source_ids import ModelSource
from helexa.neuron.config import read_config
from helexa.neuron.sources.hubs_and_sources import Sources
from neuron.fake_hub import FakeHub

WEIGHTS = bytes(range(256)) * 12000  # 3 MB
NAME = "org/tiny"
FILE = "tiny-Q8_0.gguf"


class Node:
    """The model sources of a node, configured to use `hub` and to cache files in `folder`.

    `environment` contains further environment variables.
    """

    def __init__(self, hub: FakeHub, folder: Path, refresh: bool = True, **environment: str) -> None:
        self.blobs = folder / f"models--{NAME.replace('/', '--')}" / "blobs"
        self.reports: list[tuple[str, int, int]] = []
        environ = {
            "NEURON_HARNESS__TORCH__SOURCES__HUGGINGFACE__ENDPOINT": hub.url,
            "NEURON_HARNESS__TORCH__SOURCES__HUGGINGFACE__AUTH_ENV": "TEST_HUB_TOKEN",
            "NEURON_HARNESS__TORCH__HF_CACHE": str(folder),
        }
        self.environ = environ | environment
        self.sources = Sources(read_config(None, self.environ), refresh=refresh)

    async def fetch(self, name: str = NAME, quant: str | None = None) -> Path:
        path = await self.sources.resolve(
            ModelSource.parse(name), quant=quant, progress=lambda *report: self.reports.append(report)
        )
        await asyncio.sleep(0)
        return path

    async def fetch_error(self, name: str = NAME) -> SourceError:
        """Return the error of a fetch that must fail."""
        with pytest.raises(SourceError) as caught:
            await self.fetch(name)
        assert "\n" not in str(caught.value)
        return caught.value

    def partials(self) -> list[Path]:
        """Return the partly downloaded files."""
        return sorted(self.blobs.glob("*.incomplete"))
