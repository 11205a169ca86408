"""Compare the CPU time of the gateway's HTTP listener and client with uvicorn, granian and aiohttp, as JSON lines.

usage: python perf/http_stack.py [--app relay|gateway] [--seconds 2] [--rounds 5]

The script needs the programs `wrk`, `nginx` and `node` (Node.js), and `pip install uvicorn granian`. A stack is an HTTP
listener and an HTTP client in one process with one event loop (uvloop), in front of a mock node. The listeners are
helexa's, uvicorn and granian; the clients are helexa's and aiohttp. nginx is measured too, to show what forwarding
costs on this machine. With `--app relay`, a stack only forwards bytes. With `--app gateway`, a stack runs the gateway
with a capped API key, a SQLite ledger and metrics.

The script measures the stacks one after the other, in reverse order in every other round, with these loads (rows):

    json      32 connections: a POST of 1 KB and a JSON answer
    stream    32 connections: 64 server-sent events, each in a separate write, as fast as the node writes them
    events    8 connections: 64 server-sent events at intervals of 2 ms, so that a stack handles each event separately

There is one JSON line per row and stack with medians over the rounds: CPU time per request (`cpu_us`; `runs` has the
smallest and the largest value), CPU time per event (`event_us`), requests per second (`rps`), and CPU time relative to
helexa's stack in the same round (`ratio`).
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
from starlette.types import ASGIApp, Receive, Scope, Send
from support.gateways import BODY, CAPPED, cortex_config, gateway_serves, load, nginx
from support.output import print_line
from support.servers import client_session, free_port

from helexa.core import catalog
from helexa.cortex import config, gateway
from helexa.cortex.app import create_app
from helexa.cortex.metrics import Metrics
from helexa.cortex.upstream.client import Upstream
from helexa.http.listener import Listener, bind
from helexa.http.process import collect_seldom, run
from helexa.http.request_cycle_and_disconnects import DisconnectGuard

EVENTS = 64
STACKS = (
    "helexa+helexa",
    "uvicorn+aiohttp",
    "granian+aiohttp",
    "helexa+aiohttp",
    "uvicorn+helexa",
    "granian+helexa",
)  # helexa first: all ratios refer to it
_FILLER = {"role": "system", "content": "You answer briefly and politely. " * 27}
_JSON = BODY | {"messages": [_FILLER, *BODY["messages"]]}
ROWS: dict[str, tuple[dict[str, Any], int]] = {  # body and connections
    "json": (_JSON, 32),
    "stream": (_JSON | {"stream": True}, 32),
    "events": (_JSON | {"stream": True, "pause": 1}, 8),
}


class AiohttpResponse:
    """A response of aiohttp with the methods that the gateway calls on responses of its own HTTP client."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = [(name.lower(), value) for name, value in response.raw_headers]
        self.chunk = response.content.readany
        self.close = response.release
        self._content = response.content

    @property
    def complete(self) -> bool:
        return self._content.at_eof()


class AiohttpUpstream:
    """An aiohttp client with the methods of the gateway's HTTP client (`Upstream`) that forwarding needs."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=2, sock_read=300),
        )

    async def ask(
        self, method: bytes, base: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes, **_: object
    ) -> AiohttpResponse:
        own_headers = [(name.decode(), value.decode()) for name, value in headers]
        return AiohttpResponse(
            await self._session.request(method.decode(), base + path, headers=own_headers, data=body)
        )

    async def close(self) -> None:
        await self._session.close()


class Relay:
    """An ASGI application that forwards the bytes of each request to the node."""

    def __init__(self, upstream: Any, node: str) -> None:
        self._upstream, self._node = upstream, node

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more_body = b"", True
        while more_body:
            message = await receive()
            body, more_body = body + message["body"], message["more_body"]
        sent = [(b"content-type", b"application/json")]
        response = await self._upstream.ask(b"POST", self._node, scope["path"], sent, body)
        try:
            headers = [pair for pair in response.headers if pair[0] in (b"content-type", b"content-length")]
            await send({"type": "http.response.start", "status": response.status, "headers": headers})
            more_body = True
            while more_body:
                chunk = await response.chunk()
                more_body = not response.complete
                await send({"type": "http.response.body", "body": chunk, "more_body": more_body})
        finally:
            response.close()


class Served:
    """ASGI application for uvicorn and granian, which starts and stops the gateway or the relay in its lifespan."""

    def __init__(self) -> None:
        self._app: ASGIApp
        self._open = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            self._app = await self._begin()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._open.aclose()
            await send({"type": "lifespan.shutdown.complete"})
            return
        extensions = scope.setdefault("extensions", {})
        if DisconnectGuard.NAME not in extensions:  # without this extension the application does not detect disconnects
            extensions[DisconnectGuard.NAME] = DisconnectGuard()
        await self._app(scope, receive, send)

    async def _begin(self) -> ASGIApp:
        upstream: Any = Upstream()
        if os.environ["CLIENT"] == "aiohttp":
            upstream = AiohttpUpstream()
            self._open.push_async_callback(upstream.close)
        collect_seldom()
        if os.environ["APP"] == "relay":
            return Relay(upstream, os.environ["NODE"])
        settings = config.load(Path(os.environ["CONFIG"]))
        models = catalog.load(settings.models_config)
        running = await self._open.enter_async_context(gateway.running(settings, models, Metrics()))
        running.proxy._upstream = upstream
        return create_app(running)


def serve(port: int) -> None:
    """Run helexa's HTTP listener on a port until the process receives SIGTERM."""
    run(Listener(Served()).serve(bind(("127.0.0.1", port))))


def command(listener: str, port: int) -> list[str]:
    """Return the command line of the HTTP listener `listener` with one worker, one event loop and no access log."""
    if listener == "helexa":
        return ["-c", f"import http_stack; http_stack.serve({port})"]
    options = ["http_stack:Served", "--factory", "--port", str(port), "--loop", "uvloop", "--workers", "1"]
    if listener == "uvicorn":
        return ["-m", "uvicorn", *options, "--http", "httptools", "--no-access-log", "--log-level", "warning"]
    return ["-m", "granian", *options, "--interface", "asgi", "--http", "1", "--no-ws", "--no-log"]


@contextmanager
def stack(name: str, app: str, folder: Path, node: str) -> Iterator[tuple[str, psutil.Process]]:
    """Run the stack `name` during the `with` block. Yield the base URL and the process of its server."""
    listener, client = name.split("+")
    port = free_port()
    folder.mkdir()
    environment = {"APP": app, "CLIENT": client, "NODE": node, "CONFIG": str(cortex_config(folder, port, node, CAPPED))}
    process = subprocess.Popen(
        [sys.executable, *command(listener, port)],
        env=os.environ | environment,
        cwd=Path(__file__).parent,
        start_new_session=True,
    )
    family = psutil.Process(process.pid)
    try:
        yield f"http://127.0.0.1:{port}", family
    finally:
        processes = [family, *family.children(recursive=True)]
        process.terminate()
        for survivor in psutil.wait_procs(processes, timeout=5)[1]:
            survivor.kill()
        process.wait()


async def ready(url: str, app: str) -> None:
    """Wait until a server responds. If `app` is `gateway`, also wait until the gateway can route to the node."""
    async with client_session() as session, asyncio.timeout(60):
        await listens(session, url)
        if app == "gateway":
            await gateway_serves(session, url, "m")


async def listens(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until a server responds to a request, with any status."""
    while True:
        try:
            async with session.post(url, json=BODY):
                return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.05)


def measure(app: str, seconds: float, rounds: int, folder: Path) -> None:
    """Measure all stacks alternately, then print the results."""
    port, nginx_port = free_port(), free_port()
    node = f"http://127.0.0.1:{port}"
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    with ExitStack() as running:
        mock = subprocess.Popen(["node", str(Path(__file__).with_name("support") / "mock_upstream.js"), str(port)])
        running.callback(mock.wait)
        running.callback(mock.terminate)
        plain = (f"http://127.0.0.1:{nginx_port}", running.enter_context(nginx(folder, nginx_port, node)))
        stacks = {name: running.enter_context(stack(name, app, folder / name, node)) for name in STACKS}
        for url, _ in stacks.values():
            asyncio.run(ready(url, app))
        stacks["nginx"] = plain
        for number in range(rounds):
            for row, (body, connections) in ROWS.items():
                for name in list(stacks)[:: 1 if number % 2 else -1]:
                    url, process = stacks[name]
                    runs.setdefault((row, name), []).append(load(url, process, folder, body, connections, seconds))
    for (row, name), figures in sorted(runs.items(), key=lambda item: list(ROWS).index(item[0][0])):
        cpu = [entry["cpu_us"] for entry in figures]
        baseline = [entry["cpu_us"] for entry in runs[row, STACKS[0]]]
        ratios = sorted(a / b for a, b in zip(cpu, baseline, strict=True))
        extra = {} if row == "json" else {"event_us": median(cpu) / EVENTS}
        print_line(
            row=row,
            stack=name,
            cpu_us=median(cpu),
            runs=[min(cpu), max(cpu)],
            **extra,
            rps=median(entry["rps"] for entry in figures),
            ratio=median(ratios),
            ratios=[ratios[0], ratios[-1]],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--app", choices=("relay", "gateway"), default="relay")
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for program in ("wrk", "nginx", "node"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is not installed")
    for package in ("uvicorn", "granian"):
        if find_spec(package) is None:
            raise SystemExit(f"{package} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments.app, arguments.seconds, arguments.rounds, Path(folder))


if __name__ == "__main__":
    main()
