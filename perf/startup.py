"""Measure a node's time from process start to its first answer, and its memory, as JSON lines.

usage: python perf/startup.py [MODEL] [--runs 5]

Every run starts a node with `--model MODEL`, waits until the node has loaded the model, and requests one token, then 16
concurrent answers of 64 tokens. A first warm-up run is not counted: it downloads the model if it is missing, and fills
the caches of helexa and of the system.

There is one line per row with the median and each run's value:

    listening, loaded, first_answer     seconds from the start of the process until the node accepts connections, has
                                        loaded the model, and has answered the first request
    memory@1, memory@16                 MiB of the server process with its template process, and of the engine process,
                                        after the first answer and after the 16 answers; also as multiples of the
                                        model's file size (`per_file`)
    helexa --help                       duration of the command in milliseconds

`memory@1` and `memory@16` have one line per kind of memory. Resident memory (`rss`) counts a page once for each process
that maps the page. Proportional memory (`pss`) divides shared pages among the processes that map them. Anonymous memory
(`anonymous`) is the part of `pss` that belongs to no file. Some systems report only `rss`.

The verdicts are about `first_answer` and about the resident memory after the first answer.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import psutil
from support.local_model import local_path
from support.output import print_line, print_verdict, run
from support.servers import (
    LOAD_SECONDS,
    POLL_SECONDS,
    client_session,
    free_port,
    get,
    require_alive,
    served_model,
    server,
    stream_completion,
    stream_concurrently,
)

from helexa.core.errors import HelexaError

STREAMS, TOKENS = 16, 64
ENGINE = "helexa.neuron.engine.process"
START_THRESHOLD, RESIDENT_THRESHOLD = 1.2, 2.5

Memory = dict[str, float]
"""Kind of memory -> MiB, as reported by the system."""


@dataclass(frozen=True)
class Holding:
    """Memory of a node: of its server process and template process, and of its engine process."""

    server: Memory
    engine: Memory

    @classmethod
    def current(cls, node: psutil.Process) -> "Holding":
        """Measure the memory of a running node."""
        children = node.children()
        (engine,) = (child for child in children if ENGINE in child.cmdline())
        servers = [memory(process) for process in (node, *children) if process != engine]
        return cls({kind: sum(entry[kind] for entry in servers) for kind in servers[0]}, memory(engine))


@dataclass(frozen=True)
class Start:
    """The measurements of one start: times in seconds, and memory after one response and after 16 responses."""

    listening: float
    loaded: float
    first_answer: float
    early: Holding
    late: Holding


async def start(model: str) -> Start:
    """Start a node with the model, measure its start and its memory, and stop it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with client_session() as session:
        begin = time.perf_counter()
        with server("helexa.neuron", "--host", "127.0.0.1", "--port", str(port), "--model", model) as process:
            await until_listening(session, url, process)
            listening = time.perf_counter() - begin
            served = await served_model(session, url, process)
            loaded = time.perf_counter() - begin
            await stream_completion(session, url, served, "The capital of France is", 1)
            first_answer = time.perf_counter() - begin
            early = Holding.current(process)
            await stream_concurrently(session, url, served, STREAMS, TOKENS)
            return Start(listening, loaded, first_answer, early, Holding.current(process))


async def until_listening(session: aiohttp.ClientSession, url: str, process: psutil.Process) -> None:
    """Wait until the node answers any HTTP request."""
    async with asyncio.timeout(LOAD_SECONDS):
        while await get(session, f"{url}/version") is None:
            require_alive(process)
            await asyncio.sleep(POLL_SECONDS)


def memory(process: psutil.Process) -> Memory:
    """Return the memory of a process in MiB by kind."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {"rss": process.memory_info().rss / 2**20}
    mib = {name: int(value.split()[0]) / 2**10 for name, _, value in (line.partition(":") for line in lines)}
    return {"rss": mib["Rss"], "pss": mib["Pss"], "anonymous": mib.get("Pss_Anon", mib["Anonymous"])}


def help_ms() -> float:
    """Return the duration of `helexa --help` in milliseconds, including the start of the interpreter."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "helexa", "--help"], check=True, stdout=subprocess.DEVNULL)
    return 1000 * (time.perf_counter() - begin)


async def measure(model: str, file_mib: float, runs: int) -> None:
    """Start the node `runs` times, then print the results. `file_mib` is the size of the model's file."""
    await start(model)
    starts = [await start(model) for _ in range(runs)]
    for row in ("listening", "loaded", "first_answer"):
        seconds = [getattr(entry, row) for entry in starts]
        print_line(row=row, seconds=median(seconds), runs=seconds)
    print_memory("memory@1", [entry.early for entry in starts], file_mib)
    print_memory(f"memory@{STREAMS}", [entry.late for entry in starts], file_mib)
    times = [help_ms() for _ in range(1 + 2 * runs)][1:]
    print_line(row="helexa --help", ms=median(times), runs=times)
    seconds = median(entry.first_answer for entry in starts)
    print_verdict("second start to first token, s", seconds, f"<= {START_THRESHOLD}", seconds <= START_THRESHOLD)
    resident = median(entry.early.server["rss"] + entry.early.engine["rss"] for entry in starts) / file_mib
    print_verdict("resident / file", resident, f"<= {RESIDENT_THRESHOLD}", resident <= RESIDENT_THRESHOLD)


def print_memory(row: str, holdings: list[Holding], file_mib: float) -> None:
    """Print one line for each kind of memory (`rss`, `pss`, `anonymous`)."""
    for kind in holdings[0].server:
        server, engine = [entry.server[kind] for entry in holdings], [entry.engine[kind] for entry in holdings]
        total = [a + b for a, b in zip(server, engine, strict=True)]
        print_line(
            row=row,
            kind=kind,
            mib=median(total),
            per_file=median(total) / file_mib,
            server_mib=median(server),
            engine_mib=median(engine),
            runs=total,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="helexa/small")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    try:
        path = local_path(arguments.model)
    except HelexaError as error:
        raise SystemExit(str(error)) from None
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # later starts load compiled modules, as after an installation
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    run(measure(arguments.model, sum(file.stat().st_size for file in files) / 2**20, arguments.runs))


if __name__ == "__main__":
    main()
