"""Starts gateways and nginx for benchmarks, and sends requests to them with the load generator wrk."""

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil

from support.servers import get

KEY = "benchmark"
PATH = "/v1/chat/completions"
CAPPED = f'[[entitlements.keys]]\nkey = "{KEY}"\naccount_id = "benchmark"\nhard_cap = {10**12}\n'
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello there, how are you?"}], "max_tokens": 64}
_UNITS = {"us": 0.001, "ms": 1.0, "s": 1000.0}


async def gateway_serves(session: aiohttp.ClientSession, url: str, model: str) -> None:
    """Wait until the gateway can route requests for `model` to the node."""
    async with asyncio.timeout(60):
        while True:
            nodes = (await get(session, f"{url}/api/nodes") or {"nodes": []})["nodes"]
            if any(model == info["id"] for process in nodes if process["healthy"] for info in process["models"]):
                return
            await asyncio.sleep(0.05)


def cortex_config(folder: Path, port: int, node_url: str, extra: str = "") -> Path:
    """Write a gateway's configuration file and return its path. The TOML text `extra` is appended to the file."""
    (folder / "models.toml").touch()
    path = folder / "cortex.toml"
    path.write_text(
        f'models_config = "models.toml"\n[gateway]\nlisten = "127.0.0.1:{port}"\nmetrics_listen = "127.0.0.1:0"\n'
        f'[ledger]\nurl = "sqlite:{folder}/cortex.db"\n'
        f'[[neurons]]\nname = "node"\nendpoint = "{node_url}"\n' + extra
    )
    return path


@contextmanager
def nginx(folder: Path, port: int, node: str) -> Iterator[psutil.Process]:
    config = folder / "nginx.conf"
    config.write_text(
        f"worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx.log; daemon off;\n"
        f"events {{ worker_connections 4096; }}\n"
        f"http {{ access_log off; client_max_body_size 64m; client_body_buffer_size 1m;\n"
        f"upstream node {{ server {node.removeprefix('http://')}; keepalive 64; }}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://node; proxy_http_version 1.1;\n"
        f'proxy_set_header Connection ""; proxy_buffering off; }} }} }}\n'
    )
    process = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(config)])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process and all its descendants, in seconds."""
    times = [process.cpu_times() for process in (process, *process.children(recursive=True))]
    return sum(process.user + process.system for process in times)


def load(
    url: str, process: psutil.Process, folder: Path, body: dict[str, object], connections: int, seconds: float
) -> dict[str, float]:
    """Run wrk once against a server.

    Returns:
        Requests per second (`rps`), median latency in milliseconds (`p50_ms`), and CPU microseconds of the server per
        request (`cpu_us`).
    """
    script = folder / "wrk.lua"
    script.write_text(
        'wrk.method = "POST"\nwrk.headers["content-type"] = "application/json"\n'
        f'wrk.headers["authorization"] = "Bearer {KEY}"\nwrk.body = [[{json.dumps(body)}]]\n'
    )
    cpu_before = cpu_seconds(process)
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds}s",
        "--timeout",
        "30s",
        "--latency",
        "-s",
        str(script),
        url + PATH,
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spent = cpu_seconds(process) - cpu_before
    if failed := re.search(r"Non-2xx.*|Socket errors.*", out):
        raise SystemExit(f"{url}: {failed[0]}")
    rate, middle = re.search(r"Requests/sec:\s+(\S+)", out), re.search(r"50%\s+([\d.]+)(us|ms|s)", out)
    count = re.search(r"(\d+) requests in", out)
    assert rate and middle and count, out
    return {
        "rps": float(rate[1]),
        "p50_ms": float(middle[1]) * _UNITS[middle[2]],
        "cpu_us": spent / int(count[1]) * 1e6,
    }
