"""Measure the time from the start of `helexa-acp` to its answers to `initialize` and `session/new`, as JSON lines.

usage: python perf/acp_startup.py [--runs 10]

Each run starts a new agent process with an empty home folder and an LLM endpoint that refuses connections. A first
warm-up run fills the system's caches and is not counted. The script prints three JSON lines, each with the median and
every run's value in seconds:

    initialize      time from the start of the process to the answer to `initialize`; must be at most 0.7 s
    session/new     time from the start of the process to the answer to `session/new`
    cpu             CPU time of the process until the answer to `session/new`
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

START_THRESHOLD = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    runs = [one_start() for _ in range(parser.parse_args().runs + 1)][1:]
    for name in runs[0]:
        values = [run[name] for run in runs]
        row: dict[str, Any] = {"row": name, "median": round(median(values), 3), "values": values}
        if name == "initialize":
            row |= {"threshold": START_THRESHOLD, "holds": median(values) <= START_THRESHOLD}
        print(json.dumps(row))


def one_start() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as home:
        environ = {"HOME": home, "HELEXA_ACP_BASE_URL": "http://127.0.0.1:9/v1", "HELEXA_ACP_MODEL": "none"}
        environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "helexa.acp"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | environ,
        )
        with process:
            request(process, 1, "initialize", protocolVersion=1, clientCapabilities={})
            initialized = time.perf_counter() - start
            request(process, 2, "session/new", cwd=str(Path(home).resolve()), mcpServers=[])
            opened = time.perf_counter() - start
            used = psutil.Process(process.pid).cpu_times()
            process.kill()
    return {
        "initialize": round(initialized, 3),
        "session/new": round(opened, 3),
        "cpu": round(used.user + used.system, 3),
    }


def request(process: subprocess.Popen[bytes], id: int, method: str, **params: Any) -> None:
    """Send a JSON-RPC request to the agent process and wait for its response."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).encode() + b"\n")
    process.stdin.flush()
    while line := process.stdout.readline():
        message = json.loads(line)
        if message.get("id") == id and "method" not in message:
            assert "result" in message, message
            return
    raise AssertionError("the agent has ended")


if __name__ == "__main__":
    main()
