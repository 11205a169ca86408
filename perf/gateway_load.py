"""Compare the costs of the gateway, nginx and LiteLLM in front of a mock node, as JSON lines.

usage: python perf/gateway_load.py [--seconds 4] [--rounds 3] [--litellm PYTHON] [--streams 1000]

The script needs the programs `wrk`, `nginx` and `node` (Node.js). Each server is one process with one worker:

* the gateway with a capped API key, a SQLite ledger and metrics
* nginx with a plain `proxy_pass`, to show what forwarding costs on this machine
* LiteLLM without a database, if `--litellm` names a Python interpreter that has it (`pip install 'litellm[proxy]'`)

The script measures the servers one after the other, `--rounds` times, with these loads:

    json, stream    32 connections: requests per second, and CPU time per request
    alone           one connection: the median latency minus the latency of a direct request to the mock node
    large           the same as `alone`, with prompts of 200 KB

The script also measures the gateway's resident memory: idle, and per stream with `--streams` open streams. The verdicts
use medians over the rounds.
"""

import argparse
import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import psutil
from support.gateways import BODY, CAPPED, KEY, PATH, cortex_config, gateway_serves, load, nginx
from support.output import print_line, print_verdict
from support.servers import client_session, free_port, server

LARGE = BODY | {"messages": [{"role": "user", "content": "a word and another " * 10_500}]}
MEBIBYTE = 1 << 20


@contextmanager
def litellm(python: str, folder: Path, port: int, node: str) -> Iterator[psutil.Process]:
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n- model_name: m\n  litellm_params:\n    model: openai/m\n"
        f"    api_base: {node}/v1\n    api_key: none\n"
        "general_settings:\n  dangerously_permit_weak_or_unset_master_key: true\n"  # LiteLLM is faster without keys
    )
    command = [str(Path(python).with_name("litellm")), "--config", str(config), "--port", str(port)]
    process = subprocess.Popen([*command, "--num_workers", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        server_process = psutil.Process(process.pid)
        for member in [*server_process.children(recursive=True), server_process]:
            member.kill()
        process.wait()


async def memory(url: str, process: psutil.Process, streams: int) -> tuple[float, float]:
    """Open `streams` concurrent streams through a server and measure its resident memory.

    Returns:
        The server's resident MiB before the streams were opened, and the additional MiB per open stream.
    """
    idle = process.memory_info().rss / MEBIBYTE
    async with client_session() as session:

        async def hold() -> None:
            body = BODY | {"stream": True, "hold": 1}
            response = await session.post(url + PATH, json=body, headers={"authorization": f"Bearer {KEY}"})
            await response.content.readuntil(b"\n\n")

        await asyncio.gather(*(hold() for _ in range(streams)))
        return idle, (process.memory_info().rss / MEBIBYTE - idle) / streams


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    ports = {name: free_port() for name in ("node", "cortex", "nginx", "litellm")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    mock = subprocess.Popen(["node", str(Path(__file__).with_name("support") / "mock_upstream.js"), str(ports["node"])])
    try:
        config = cortex_config(folder, ports["cortex"], urls["node"], CAPPED)
        with (
            server("helexa.cortex", "serve", "-c", str(config)) as cortex,
            nginx(folder, ports["nginx"], urls["node"]) as plain,
        ):
            asyncio.run(_ready(urls["cortex"]))
            idle, per_stream = asyncio.run(memory(urls["cortex"], cortex, arguments.streams))
            processes = {"node": psutil.Process(mock.pid), "nginx": plain, "cortex": cortex}
            if arguments.litellm:
                with litellm(arguments.litellm, folder, ports["litellm"], urls["node"]) as litellm_process:
                    asyncio.run(_until_answered(urls["litellm"]))
                    _rounds(arguments, folder, urls, processes | {"litellm": litellm_process})
            else:
                _rounds(arguments, folder, urls, processes)
        print_verdict("resident memory idle, MiB", idle, "<= 120", idle <= 120)
        print_verdict(f"resident memory a stream of {arguments.streams}, MiB", per_stream, "<= 1", per_stream <= 1)
    finally:
        mock.terminate()
        mock.wait()


def _rounds(
    arguments: argparse.Namespace, folder: Path, urls: dict[str, str], processes: dict[str, psutil.Process]
) -> None:
    rows = {
        "json": (BODY, 32, list(processes)),
        "stream": (BODY | {"stream": True}, 32, list(processes)),
        "alone": (BODY, 1, ["node", "cortex"]),
        "large": (LARGE, 1, ["node", "cortex"]),
    }
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(arguments.rounds):
        for row, (body, connections, names) in rows.items():
            for name in names:
                got = load(urls[name], processes[name], folder, body, connections, arguments.seconds)
                results.setdefault((row, name), []).append(got)
    middle = {key: {unit: median(run[unit] for run in runs) for unit in runs[0]} for key, runs in results.items()}
    for (row, name), figures in middle.items():
        print_line(row=row, server=name, **figures)
    _judge(middle)


def _judge(middle: dict[tuple[str, str], dict[str, float]]) -> None:
    for row, threshold in (("json", 12.0), ("stream", 2.0)):
        ratio = middle[row, "cortex"]["cpu_us"] / middle[row, "nginx"]["cpu_us"]
        print_verdict(f"{row}, processor time / nginx", ratio, f"<= {threshold}", ratio <= threshold)
        if (row, "litellm") in middle:
            faster = middle[row, "cortex"]["rps"] / middle[row, "litellm"]["rps"]
            print_verdict(f"{row}, requests per second / LiteLLM", faster, ">= 30", faster >= 30)
            cheaper = middle[row, "litellm"]["cpu_us"] / middle[row, "cortex"]["cpu_us"]
            print_verdict(f"{row}, LiteLLM / processor time", cheaper, ">= 30", cheaper >= 30)
    for row, threshold in (("alone", 0.5), ("large", 3.0)):
        added = middle[row, "cortex"]["p50_ms"] - middle[row, "node"]["p50_ms"]
        print_verdict(f"{row}, milliseconds added", added, f"<= {threshold}", added <= threshold)


async def _ready(url: str) -> None:
    async with client_session() as session:
        await gateway_serves(session, url, "m")


async def _until_answered(url: str) -> None:
    async with client_session() as session, asyncio.timeout(120):
        while True:
            try:
                async with session.post(url + PATH, json=BODY, headers={"authorization": "Bearer none"}) as response:
                    if response.status == 200:
                        return
            except OSError:
                pass
            await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--litellm", metavar="PYTHON")
    parser.add_argument("--streams", type=int, default=1000)
    arguments = parser.parse_args()
    for program in ("wrk", "nginx", "node"):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, Path(folder))


if __name__ == "__main__":
    main()
