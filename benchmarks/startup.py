"""How long a node takes from its command to its first answer, and what it holds in memory then, as JSON lines.

usage: python benchmarks/startup.py [MODEL] [--runs 5]

Every run starts a node with `--model MODEL`, waits until it listens and serves, asks for one token, then for 16 answers
of 64 tokens side by side. A run before the first is not counted: it fetches the model if it is not here yet, and fills
the system's file cache.

One line per row, with the median and each run's value. `listening`, `loaded` and `first_answer` are seconds from the
start of the process. `memory@1` and `memory@16` are MiB resident after the one token and after the 16 answers, of the
server and of its engine; pages that they share are divided among them (PSS). `helexa --help` is in milliseconds.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median

import aiohttp
import psutil
from serving import (
    LOAD_SECONDS,
    POLL_SECONDS,
    ask,
    ask_side_by_side,
    client_session,
    free_port,
    get,
    require_alive,
    run,
    say,
    served_model,
    server,
)

STREAMS, TOKENS = 16, 64


@dataclass(frozen=True)
class Memory:
    """MiB that a node's server and engine hold."""

    server: float
    engine: float


@dataclass(frozen=True)
class Start:
    """What one start took, in seconds, and what it held after one token and after several answers."""

    listening: float
    loaded: float
    first_answer: float
    early: Memory
    late: Memory


async def start(model: str) -> Start:
    """Start a node, use it, and end it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with client_session() as session:
        begin = time.perf_counter()
        with server("helexa.neuron", "--host", "127.0.0.1", "--port", str(port), "--model", model) as process:
            await until_listening(session, url, process)
            listening = time.perf_counter() - begin
            served = await served_model(session, url, process)
            loaded = time.perf_counter() - begin
            await ask(session, url, served, "The capital of France is", 1)
            first_answer = time.perf_counter() - begin
            early = memory(process)
            await ask_side_by_side(session, url, served, STREAMS, TOKENS)
            return Start(listening, loaded, first_answer, early, memory(process))


async def until_listening(session: aiohttp.ClientSession, url: str, process: psutil.Process) -> None:
    """Wait until the node answers anything at all."""
    async with asyncio.timeout(LOAD_SECONDS):
        while await get(session, f"{url}/version") is None:
            require_alive(process)
            await asyncio.sleep(POLL_SECONDS)


def memory(process: psutil.Process) -> Memory:
    """What a node holds now."""
    return Memory(resident_mib(process), sum(resident_mib(engine) for engine in process.children(recursive=True)))


def resident_mib(process: psutil.Process) -> float:
    """Proportional set size where the system tells it, else resident set size."""
    info = process.memory_full_info()
    return getattr(info, "pss", info.rss) / 2**20


def help_ms() -> float:
    """Milliseconds that `helexa --help` takes, the interpreter's own start included."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "helexa", "--help"], check=True, stdout=subprocess.DEVNULL)
    return 1000 * (time.perf_counter() - begin)


async def measure(model: str, runs: int) -> None:
    """Start several times, then print."""
    await start(model)
    starts = [await start(model) for _ in range(runs)]
    for row in ("listening", "loaded", "first_answer"):
        seconds = [getattr(one, row) for one in starts]
        say(row=row, seconds=median(seconds), runs=seconds)
    for row, found in (
        ("memory@1", [one.early for one in starts]),
        (f"memory@{STREAMS}", [one.late for one in starts]),
    ):
        whole = [one.server + one.engine for one in found]
        parts = {"server_mib": median(one.server for one in found), "engine_mib": median(one.engine for one in found)}
        say(row=row, mib=median(whole), **parts, runs=whole)
    times = [help_ms() for _ in range(1 + 2 * runs)][1:]
    say(row="helexa --help", ms=median(times), runs=times)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="helexa/small")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    run(measure(arguments.model, arguments.runs))


if __name__ == "__main__":
    main()
