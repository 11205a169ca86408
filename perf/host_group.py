"""Compute a model on two hosts, which are two network namespaces of this machine, and cut the link between them.

usage: python perf/host_group.py [--model MODEL] [--cuts 5] [--streams 4]

The script needs root and `ip` (Debian's iproute2). Host 1 runs in a new network namespace. A pair of virtual Ethernet
devices connects it with host 0. The script prints a JSON line per measurement:

    rates       tokens per second of one stream, on one host and on two hosts
    cut         the link is down: seconds until the engine has ended, and, after the link is up again, until a request
                succeeds

The exit code is 1 if a response of two hosts differs from the response of one host, or if a process is left.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import psutil
from support.local_model import local_path
from support.servers import client_session, free_port, get

NAMESPACE = "helexa-host1"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
DEVICES = ("helexa0", "helexa1")
TOKENS = 48
WAIT_SECONDS = 180.0
END_SECONDS = 30.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def namespace() -> Iterator[None]:
    """Create the network namespace of host 1, and connect it with this namespace."""
    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", DEVICES[0], "type", "veth", "peer", "name", DEVICES[1], "netns", NAMESPACE)
        ip("address", "add", f"{ADDRESSES[0]}/30", "dev", DEVICES[0])
        ip("-n", NAMESPACE, "address", "add", f"{ADDRESSES[1]}/30", "dev", DEVICES[1])
        ip("-n", NAMESPACE, "link", "set", "lo", "up")
        ip("-n", NAMESPACE, "link", "set", DEVICES[1], "up")
        ip("link", "set", DEVICES[0], "up")
        yield
    finally:
        ip("netns", "delete", NAMESPACE)


@contextmanager
def node(host: int, folder: Path, port: int, group_port: int) -> Iterator[psutil.Process]:
    """Run the node process of a host during the `with` block."""
    environment = os.environ | {
        "RANK": str(host),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(group_port),
        "NEURON_GROUP__INTERFACE": DEVICES[host],
        "NEURON_GROUP__SECRET_FILE": str(folder / "secret"),
        "NEURON_RECOVERY__STEP_TIMEOUT_SECS": "2",
        "NEURON_RECOVERY__MAX_RESTARTS": "1000",
    }
    command = [sys.executable, "-m", "helexa.neuron", "serve", "--hosts", "2", "--port", str(port)]
    if host:
        command = ["ip", "netns", "exec", NAMESPACE, *command]
    with (folder / f"host{host}.log").open("w") as log:
        process = psutil.Popen(command, env=environment, stderr=log)
        try:
            yield process
        finally:
            processes = [process, *process.children(recursive=True)]
            process.send_signal(signal.SIGTERM)
            _, alive = psutil.wait_procs(processes, END_SECONDS)
            for left in alive:
                left.kill()
            if alive:
                raise SystemExit(f"processes of host {host} are left: {[left.cmdline() for left in alive]}")


async def load(session: aiohttp.ClientSession, url: str, model: Path, name: str, hosts: int) -> None:
    body = {"model_id": name, "source": f"file:{model}", "pipeline_parallel": hosts}
    async with session.post(f"{url}/models/load", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"the load failed: {await response.text()}")


async def complete(session: aiohttp.ClientSession, url: str, name: str, number: int) -> str | None:
    """Return the response to prompt `number`; None if the node returned an error."""
    prompt = f"Story number {number}, told by an old sailor:"
    body = {"model": name, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            return (await response.json())["choices"][0]["text"] if response.status == 200 else None
    except aiohttp.ClientError:
        return None


async def rate(session: aiohttp.ClientSession, url: str, name: str) -> float:
    begin = time.monotonic()
    assert await complete(session, url, name, 0) is not None
    return round(TOKENS / (time.monotonic() - begin), 1)


async def status(session: aiohttp.ClientSession, url: str, name: str) -> str:
    return next(model["status"] for model in await get(session, f"{url}/models") if model["id"] == name)


async def cut(session: aiohttp.ClientSession, url: str, expected: Sequence[str]) -> bool:
    """Take the link down under load, and up again when the engine has ended. Return whether all responses are equal."""
    streams = [asyncio.create_task(complete(session, url, "two", number)) for number in range(len(expected))]
    await asyncio.sleep(0.3)
    ip("link", "set", DEVICES[0], "down")
    begin = time.monotonic()
    async with asyncio.timeout(WAIT_SECONDS):
        while await status(session, url, "two") == "loaded":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        ended = time.monotonic() - begin
        interrupted = [text for text in await asyncio.gather(*streams) if text is not None]
        ip("link", "set", DEVICES[0], "up")
        begin = time.monotonic()
        while await complete(session, url, "two", 0) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    back = time.monotonic() - begin
    print(json.dumps({"cut": {"ended_s": round(ended, 2), "back_s": round(back, 2)}}), flush=True)
    texts = [await complete(session, url, "two", number) for number in range(len(expected))]
    return texts == list(expected) and set(interrupted) <= set(expected)


async def run(arguments: argparse.Namespace, model: Path, url: str) -> bool:
    async with client_session() as session:
        async with asyncio.timeout(WAIT_SECONDS):
            while not await get(session, f"{url}/health"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await load(session, url, model, "one", 1)
        await load(session, url, model, "two", 2)
        expected = [await complete(session, url, "one", number) for number in range(arguments.streams)]
        assert all(expected)
        texts = await asyncio.gather(*(complete(session, url, "two", n) for n in range(arguments.streams)))
        equal = list(texts) == expected
        rates = {name: await rate(session, url, name) for name in ("one", "two")}
        print(json.dumps({"rates": rates, "equal": equal}), flush=True)
        for _ in range(arguments.cuts):
            equal = await cut(session, url, [text or "" for text in expected]) and equal
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="helexa/small")
    parser.add_argument("--cuts", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    arguments = parser.parse_args()
    model = local_path(arguments.model).absolute()
    port, group_port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as name, ExitStack() as hosts:
        folder = Path(name)
        (folder / "secret").write_text(os.urandom(16).hex())
        hosts.enter_context(namespace())
        for host in range(2):
            hosts.enter_context(node(host, folder, port, group_port))
        try:
            equal = asyncio.run(run(arguments, model, f"http://127.0.0.1:{port}"))
        except BaseException:
            for host in range(2):
                sys.stderr.write((folder / f"host{host}.log").read_text()[-3000:])
            raise
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
