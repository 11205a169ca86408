"""Starts servers for benchmarks and sends requests to them over HTTP."""

import asyncio
import itertools
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import aiohttp
import psutil

LOAD_SECONDS = 1800.0
END_SECONDS = 15.0
POLL_SECONDS = 0.01

_serial = itertools.count(1)


@dataclass(frozen=True)
class StreamTiming:
    """Timing of a streamed response: number of tokens, and times of the request and of the first and last token.

    Times are seconds of `time.perf_counter`.
    """

    tokens: int
    requested: float
    first: float
    last: float


@dataclass(frozen=True)
class Row:
    """Results of several concurrent streams: total tokens per second, median TTFT, and median time per output token."""

    tok_s: float
    ttft_ms: float
    tpot_ms: float


@contextmanager
def server(module: str, *arguments: str) -> Iterator[psutil.Process]:
    """Run a server (`python -m module`) during the `with` block. Then stop the server and its child processes."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        family = psutil.Process(process.pid)
        try:
            yield family
        except (Exception, SystemExit):
            log.seek(0)
            sys.stderr.writelines(log.readlines()[-20:])
            raise
        finally:
            processes = [family, *_children(family)]
            process.send_signal(signal.SIGTERM)
            _, remaining = psutil.wait_procs(processes, timeout=END_SECONDS)
            for survivor in remaining:
                survivor.kill()
            process.wait()


@asynccontextmanager
async def node(model: str, session: aiohttp.ClientSession) -> AsyncIterator[tuple[psutil.Process, str, str]]:
    """Run a node with one model during the `with` block. Yield its process, its base URL and the model's id."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server("helexa.neuron", "--host", "127.0.0.1", "--port", str(port), "--model", model) as process:
        yield process, url, await served_model(session, url, process)


async def served_model(session: aiohttp.ClientSession, url: str, process: psutil.Process) -> str:
    """Wait until the node has loaded its model. Return the model's id."""
    async with asyncio.timeout(LOAD_SECONDS):
        while True:
            health = await get(session, f"{url}/health")
            if health and health["activation"]["failed"]:
                raise SystemExit(health["activation"]["failed"][0]["error"])
            if health and health["activation"]["completed"]:
                return health["activation"]["completed"][0]
            require_alive(process)
            await asyncio.sleep(POLL_SECONDS)


def require_alive(process: psutil.Process) -> None:
    """Exit with an error message if the server process has ended."""
    if process.status() == psutil.STATUS_ZOMBIE:
        raise SystemExit("the server has ended by itself")


async def get(session: aiohttp.ClientSession, url: str) -> Any:
    """Send a GET request and return the JSON response, or None if the connection fails."""
    try:
        async with session.get(url) as response:
            return await response.json()
    except aiohttp.ClientConnectionError:
        return None


async def stream_completion(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str, tokens: int
) -> StreamTiming:
    """Request a streamed greedy response of exactly `tokens` tokens and return its timing."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    requested = time.perf_counter()
    first, tail = 0.0, b""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"the server answered HTTP {response.status}: {await response.text()}")
        async for chunk in response.content.iter_any():
            if not first and b"data: " in chunk:
                first = time.perf_counter()
            tail = (tail + chunk)[-4096:]
    last = time.perf_counter()
    *_, end, done, _ = tail.split(b"\n\n")
    if done != b"data: [DONE]" or b'"usage"' not in end:
        raise SystemExit(f"the stream broke off: {end.decode(errors='replace')}")
    return StreamTiming(json.loads(end.removeprefix(b"data: "))["usage"]["completion_tokens"], requested, first, last)


async def stream_concurrently(session: aiohttp.ClientSession, url: str, model: str, streams: int, tokens: int) -> Row:
    """Request `streams` responses of `tokens` tokens each at the same time, and return their combined results."""
    prompts = [f"Story number {next(_serial)}, told by an old sailor:" for _ in range(streams)]
    timings = await asyncio.gather(*(stream_completion(session, url, model, prompt, tokens) for prompt in prompts))
    seconds = max(timing.last for timing in timings) - min(timing.requested for timing in timings)
    return Row(
        tok_s=sum(timing.tokens for timing in timings) / seconds,
        ttft_ms=median(1000 * (timing.first - timing.requested) for timing in timings),
        tpot_ms=median(1000 * (timing.last - timing.first) / max(timing.tokens - 1, 1) for timing in timings),
    )


def free_port() -> int:
    """Return a free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def client_session() -> aiohttp.ClientSession:
    """Return an HTTP session with persistent connections and without limits on connections or duration."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_read=600)
    )


def _children(process: psutil.Process) -> Iterable[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
