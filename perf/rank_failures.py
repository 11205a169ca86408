"""Kill and stop random processes (ranks) of a tensor-parallel engine under load, and check that the node recovers.

usage: python perf/rank_failures.py [--model MODEL] [--ranks 2] [--kills 50] [--hangs 20] [--streams 8] [--seed 1]
           [--pause 1]

`--pause` is the number of seconds between the first response after a fault and the next fault. If the pause is shorter
than 30 seconds, the node waits before it restarts the engine, because the engine crashes again and again.

A rank is one of the processes that compute the model together. The node runs in its own process. Clients stream greedy
responses without a pause, and repeat requests that failed. Each fault is a signal to one random rank: SIGKILL or
SIGSTOP. The node detects SIGSTOP because the engine makes no progress for 2 seconds. The script prints a JSON line per
fault, then the results. The exit code is 1 if one of these checks failed:

    back        after each fault, a request succeeds, and no process of the old engine is left
    answers     every complete response equals the response to the same request before the first fault
    leaks       at the end, all KV pages are free
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import aiohttp
import psutil
from support.local_model import local_path
from support.servers import client_session, get
from support.soak_node import SoakNode

TOKENS = 48
BACK_SECONDS = 120.0
END_SECONDS = 1.0


async def complete(session: aiohttp.ClientSession, node: SoakNode, number: int) -> str | None:
    """Send the request `number`. Return the response text, or None if the node or the stream returned an error."""
    body = {
        "model": node.model,
        "prompt": f"Story number {number}, told by an old sailor:",
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    text = ""
    try:
        async with session.post(f"{node.url}/v1/completions", json=body) as response:
            if response.status != 200:
                return None
            async for line in response.content:
                if line == b"data: [DONE]\n":
                    return text
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return None
                    text += "".join(choice["text"] for choice in event["choices"])
    except aiohttp.ClientError:
        pass
    return None


async def stream_forever(
    session: aiohttp.ClientSession, node: SoakNode, number: int, expected: str, results: dict[str, int]
) -> None:
    """Repeat the request `number` until canceled, and count right, wrong and failed responses in `results`."""
    while True:
        text = await complete(session, node, number)
        kind = "failed" if text is None else "equal" if text == expected else "different"
        results[kind] += 1
        if text is None:
            await asyncio.sleep(0.1)


async def strike(session: aiohttp.ClientSession, node: SoakNode, fault: signal.Signals) -> dict[str, float | int | str]:
    """Send the signal `fault` to a random rank, wait until a request succeeds again, and return the output line."""
    processes = node.ranks()
    victim = random.choice(processes)
    begin = time.monotonic()
    victim.send_signal(fault)
    ended = asyncio.to_thread(psutil.wait_procs, processes, BACK_SECONDS)
    _, alive = await ended
    detected = time.monotonic() - begin
    async with asyncio.timeout(BACK_SECONDS):
        while await complete(session, node, 0) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return {
        "fault": fault.name,
        "rank": processes.index(victim),
        "ended_s": round(detected, 2),
        "back_s": round(time.monotonic() - begin, 2),
        "left": len(alive),
    }


async def run(arguments: argparse.Namespace, model: Path, folder: Path) -> bool:
    faults = [signal.SIGKILL] * arguments.kills + [signal.SIGSTOP] * arguments.hangs
    random.shuffle(faults)
    with SoakNode(model, folder, arguments.ranks) as node:
        async with client_session() as session:
            await node.ready(session)
            expected = [await complete(session, node, number) for number in range(arguments.streams)]
            assert all(expected), "the node does not answer"
            results = {"equal": 0, "different": 0, "failed": 0}
            clients = [
                asyncio.create_task(stream_forever(session, node, number, text or "", results))
                for number, text in enumerate(expected)
            ]
            records = []
            for fault in faults:
                await asyncio.sleep(arguments.pause)
                records.append(await strike(session, node, fault))
                print(json.dumps(records[-1]), flush=True)
            for client in clients:
                client.cancel()
                with suppress(asyncio.CancelledError):
                    await client
            await asyncio.sleep(END_SECONDS)
            health = await get(session, f"{node.url}/health")
            pages = [(model["kv_pages_free"], model["kv_pages_total"]) for model in health["models"]]
    summary = {
        fault.name: {
            key: [min(values), median(values), max(values)]
            for key in ("ended_s", "back_s")
            if (values := [float(record[key]) for record in records if record["fault"] == fault.name])
        }
        for fault in (signal.SIGKILL, signal.SIGSTOP)
    }
    leaks = any(free != total for free, total in pages)
    left = sum(int(record["left"]) for record in records)
    print(json.dumps({"responses": results, "min_median_max": summary, "processes_left": left, "kv_pages": pages}))
    return not (leaks or left or results["different"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="helexa/small")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--hangs", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=1.0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        passed = asyncio.run(run(arguments, local_path(arguments.model), Path(folder)))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
