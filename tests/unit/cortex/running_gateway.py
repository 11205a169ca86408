"""A real gateway on real sockets, in front of fake nodes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from cortex.documented_replies import check_reply
from cortex.fake_node import FakeNode
from helexa.core.address import Address
from helexa.core.catalog import Catalog
from helexa.core.catalog import load as load_catalog
from helexa.cortex import gateway
from helexa.cortex.app import create_app
from helexa.cortex.config import CortexConfig, load
from helexa.cortex.fleet.node_client import NodeClient
from helexa.cortex.gateway import Gateway
from helexa.cortex.metrics import Metrics, create_metrics_app
from helexa.cortex.upstream.client import Upstream
from helexa.http.acceptor import ConnectionLimits
from helexa.http.listener import Listener, bind

JSON_HEADERS = {"content-type": "application/json"}


@dataclass
class Cortex:
    """A running gateway and an HTTP client for it."""

    url: str
    metrics_url: str
    client: aiohttp.ClientSession
    gateway: Gateway

    async def get(self, path: str) -> Any:
        async with self.client.get(self.url + path) as response:
            reply = await response.json()
        if response.status == 200 and "anthropic-version" not in response.request_info.headers:
            check_reply(path, reply)
        return reply

    async def ask(self, model: str = "Org/M", **fields: Any) -> tuple[int, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], **fields}
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body) as response:
            return response.status, await (response.read() if fields.get("stream") else response.json())

    async def sample(self, name: str, **labels: str) -> float:
        """Return the value of a metric, 0 if it is not exposed."""
        text = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        async with self.client.get(self.metrics_url) as response:
            lines = (await response.text()).splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{{text}}}")), 0.0)


async def eventually(condition: Callable[[], Any]) -> None:
    """Wait until `condition` returns or resolves to a true value. Fail after 60 seconds."""
    async with asyncio.timeout(60):
        while True:
            outcome = condition()
            if await outcome if asyncio.iscoroutine(outcome) else outcome:
                return
            await asyncio.sleep(0.005)


@asynccontextmanager
async def open_client() -> AsyncIterator[NodeClient]:
    upstream = Upstream()
    try:
        yield NodeClient(upstream)
    finally:
        upstream.close()
        await asyncio.sleep(0)  # the event loop closes the connections


@asynccontextmanager
async def listening(listener: Listener) -> AsyncIterator[str]:
    bound = bind(Address("127.0.0.1", 0))
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    task = asyncio.create_task(listener.serve(bound))
    try:
        await eventually(lambda: listener.started)
        yield url
    finally:
        listener.should_exit = True
        await task


@asynccontextmanager
async def running_cortex(
    *nodes: FakeNode,
    ready: bool = True,
    poll_interval_secs: float = 0.05,
    settings: dict[str, Any] | None = None,
    path: Path | None = None,
    limits: ConnectionLimits | None = None,
    **catalog: Any,
) -> AsyncIterator[Cortex]:
    """Run a gateway in front of `nodes`.

    Args:
        settings: further sections of the configuration.
        path: a configuration file that replaces all other settings.
        limits: connection limits of the API's listener.
        catalog: contents of the model catalog.
    """
    metrics = Metrics()
    with TemporaryDirectory() as folder:
        sections: dict[str, Any] = {
            "gateway": {"poll_interval_secs": poll_interval_secs, "max_body_mb": 2},
            "ledger": {"url": f"sqlite:{folder}/cortex.db"},
            "neurons": [{"name": node.name, "endpoint": node.url} for node in nodes],
        }
        for name, section in (settings or {}).items():
            sections[name] = {**sections.get(name, {}), **section} if isinstance(section, dict) else section
        config = load(path) if path else CortexConfig.model_validate(sections)
        models = load_catalog(config.models_config) if path else Catalog.model_validate(catalog)
        async with (
            gateway.running(config, models, metrics, path) as running,
            listening(api := Listener(create_app(running), limits=limits, bodies=running.bodies)) as url,
            listening(scraped := Listener(create_metrics_app(metrics))) as scrape,
            aiohttp.ClientSession(headers=JSON_HEADERS) as client,
        ):
            cortex = Cortex(url, f"{scrape}/metrics", client, running)

            async def all_up() -> bool:
                return (await cortex.get("/health"))["nodes"]["healthy"] == len(nodes)

            try:
                if ready:
                    await eventually(all_up)
                yield cortex
            finally:
                api.should_exit = scraped.should_exit = True  # stop both at the same time: each takes a while
