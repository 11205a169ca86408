"""Compare the CPU time of a gateway with the ledger's write-ahead log to a gateway without the log.

usage: python perf/ledger_log.py [--pairs 10] [--seconds 2]

The script needs the programs `wrk` and `node` (Node.js). Both gateways have a capped API key and a SQLite ledger, and
run in front of the same mock node. Without the log, each request waits for two batches of the database: one with its
reservation, and one with its charge. The two gateways alternate in each load:

    json      JSON requests on 32 connections
    alone     JSON requests on one connection
    stream    streams on 32 connections

The script prints one JSON line per load: the median CPU time per request, the median latency, and in how many pairs the
gateway with the log needed less CPU time. CPU time is meaningful on a busy machine, too; latency is not.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil
from support.gateways import BODY, CAPPED, cortex_config, gateway_serves, load
from support.output import print_line
from support.servers import client_session, free_port, server

LOADS = {"json": (BODY, 32), "alone": (BODY, 1), "stream": (BODY | {"stream": True}, 32)}
MODULES = {"log": "helexa.cortex", "no_log": "ledger_log"}  # this script is also the program of the second gateway


@contextmanager
def gateways(folder: Path, node: str) -> Iterator[dict[str, tuple[str, psutil.Process]]]:
    """Run both gateways during the `with` block. Yield their URLs and processes by name."""
    ports = {name: free_port() for name in MODULES}
    configs: dict[str, Path] = {}
    for name in MODULES:
        (folder / name).mkdir()
        configs[name] = cortex_config(folder / name, ports[name], node, CAPPED)
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    with (
        server(MODULES["log"], "serve", "-c", str(configs["log"])) as log,
        server(MODULES["no_log"], "serve", "-c", str(configs["no_log"])) as no_log,
    ):
        asyncio.run(_ready(urls.values()))
        yield {"log": (urls["log"], log), "no_log": (urls["no_log"], no_log)}


async def _ready(urls: Iterable[str]) -> None:
    async with client_session() as session:
        for url in urls:
            await gateway_serves(session, url, "m")


def measure(pairs: int, seconds: int, folder: Path) -> None:
    node_port = free_port()
    mock = subprocess.Popen(["node", str(Path(__file__).with_name("support") / "mock_upstream.js"), str(node_port)])
    try:
        with gateways(folder, f"http://127.0.0.1:{node_port}") as servers:
            for name, (body, connections) in LOADS.items():
                runs: dict[str, list[dict[str, float]]] = {server: [] for server in servers}
                for pair in range(pairs):
                    for server_name in sorted(servers, reverse=pair % 2 == 1):
                        url, process = servers[server_name]
                        runs[server_name].append(load(url, process, folder, body, connections, seconds))
                wins = sum(log["cpu_us"] < other["cpu_us"] for log, other in zip(*runs.values(), strict=True))
                figures = {
                    f"{unit}_{server}": median(run[unit] for run in rows)
                    for server, rows in runs.items()
                    for unit in ("cpu_us", "p50_ms")
                }
                print_line(load=name, pairs=pairs, log_cheaper=wins, **figures)
    finally:
        mock.terminate()
        mock.wait()


def serve_without_log() -> None:
    """Run `cortex` with a ledger that never opens its write-ahead log."""
    from helexa.cortex.cli import main as cortex
    from helexa.cortex.ledger import ledger
    from helexa.cortex.ledger.group_commit import GroupCommit

    ledger.GroupCommit = lambda database, clock, name, _path: GroupCommit(database, clock, name)  # type: ignore[assignment]
    cortex()


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve_without_log()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=2)
    arguments = parser.parse_args()
    for program in ("wrk", "node"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is not installed")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # so that `python -m ledger_log` finds this script
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments.pairs, arguments.seconds, Path(folder))


if __name__ == "__main__":
    main()
