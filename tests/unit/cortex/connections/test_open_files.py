"""A gateway process whose limit on open files is below its number of connections."""

import asyncio
from collections import Counter
from pathlib import Path

from aiohttp import web

from cortex import fake_node
from cortex.cortex_process import serving
from cortex.fake_node import FakeNode
from cortex.raw_http import post, read_response
from cortex.running_gateway import eventually

OPEN_FILES = 200
CONNECTIONS = 300


async def ask(url: str) -> int:
    """Return the status of a request on its own connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    try:
        writer.write(post())
        return (await read_response(reader))[0]
    finally:
        writer.close()


async def test_connections_above_the_limit_of_open_files_are_served_or_get_503(node: FakeNode, tmp_path: Path) -> None:
    received = asyncio.Event()

    async def hold(_: FakeNode, request: web.Request) -> web.StreamResponse:
        received.set()
        await node.go_on.wait()
        return await fake_node.respond(node, request)

    (tmp_path / "models.toml").touch()
    config = tmp_path / "cortex.toml"
    config.write_text(
        'models_config = "models.toml"\n[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\n'
        f'[ledger]\nurl = "sqlite:{tmp_path}/cortex.db"\n[[neurons]]\nname = "node"\nendpoint = "{node.url}"\n'
    )

    async def served(url: str) -> bool:
        return await ask(url) == 200

    async with asyncio.timeout(60), serving(config, open_files=OPEN_FILES) as (_, url, _):
        await eventually(lambda: served(url))
        node.speak = hold
        asks = [asyncio.create_task(ask(url)) for _ in range(CONNECTIONS)]
        await received.wait()
        node.go_on.set()
        statuses = Counter(await asyncio.gather(*asks, return_exceptions=True))
        assert set(statuses) == {200, 503}
        await eventually(lambda: served(url))  # the gateway may still close the connections that got a 503
