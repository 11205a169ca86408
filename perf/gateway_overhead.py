"""Measure the latency that a gateway adds to a direct request to a node, as JSON lines.

usage: python perf/gateway_overhead.py [MODEL] [--requests 200] [--tokens 1]

A node and a gateway in front of it run in separate processes; this process is the client. The client sends the same
short prompt to the node and to the gateway in pairs and alternates the order.

One line per route has the median and the 90th percentile of the milliseconds to the first token (`ttft_ms`) and to the
end of the answer (`total_ms`). The last line, `overhead`, has the medians of the differences within the pairs.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from statistics import median, quantiles

import aiohttp
from serving import Answer, ask, client_session, free_port, get, node, run, say, server

PROMPT = "The capital of France is"
WARM_UP = 10


async def gateway_serves(session: aiohttp.ClientSession, url: str, model: str) -> None:
    """Wait until the gateway has discovered the model on the node."""
    async with asyncio.timeout(60):
        while True:
            nodes = (await get(session, f"{url}/api/nodes") or {"nodes": []})["nodes"]
            if any(model == info["id"] for one in nodes if one["healthy"] for info in one["models"]):
                return
            await asyncio.sleep(0.05)


def cortex_config(folder: Path, port: int, node_url: str, more: str = "") -> Path:
    """Write a gateway's configuration; `more` is appended TOML."""
    (folder / "models.toml").touch()
    path = folder / "cortex.toml"
    path.write_text(
        f'models_config = "models.toml"\n[gateway]\nlisten = "127.0.0.1:{port}"\nmetrics_listen = "127.0.0.1:0"\n'
        f'[ledger]\nurl = "sqlite:{folder}/cortex.db"\n'
        f'[[neurons]]\nname = "node"\nendpoint = "{node_url}"\n' + more
    )
    return path


async def measure(model: str, requests: int, tokens: int) -> None:
    """Send requests in pairs, then print the results."""
    port = free_port()
    ways: dict[str, list[Answer]] = {"direct": [], "gateway": []}
    with tempfile.TemporaryDirectory() as folder:
        async with client_session() as session, node(model, session) as (_, node_url, served):
            config = cortex_config(Path(folder), port, node_url)
            urls = {"direct": node_url, "gateway": f"http://127.0.0.1:{port}"}
            with server("helexa.cortex", "serve", "-c", str(config)):
                await gateway_serves(session, urls["gateway"], served)
                for number in range(WARM_UP + requests):
                    for way in list(ways)[:: 1 if number % 2 else -1]:
                        answer = await ask(session, urls[way], served, PROMPT, tokens)
                        if number >= WARM_UP:
                            ways[way].append(answer)
    for way, answers in ways.items():
        first, total = first_ms(answers), total_ms(answers)
        say(
            row=way,
            ttft_ms=median(first),
            ttft_p90_ms=quantiles(first, n=10)[-1],
            total_ms=median(total),
            total_p90_ms=quantiles(total, n=10)[-1],
        )
    say(
        row="overhead",
        ttft_ms=median_difference(first_ms(ways["gateway"]), first_ms(ways["direct"])),
        total_ms=median_difference(total_ms(ways["gateway"]), total_ms(ways["direct"])),
        requests=requests,
        tokens=tokens,
    )


def first_ms(answers: list[Answer]) -> list[float]:
    """Return the milliseconds to the first token."""
    return [1000 * (answer.first - answer.asked) for answer in answers]


def total_ms(answers: list[Answer]) -> list[float]:
    """Return the milliseconds to the end of the answer."""
    return [1000 * (answer.last - answer.asked) for answer in answers]


def median_difference(longer: list[float], shorter: list[float]) -> float:
    """Return the median of the differences within the pairs."""
    return median(a - b for a, b in zip(longer, shorter, strict=True))


def main() -> None:
    """Read the command line and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="helexa/small")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1)
    arguments = parser.parse_args()
    run(measure(arguments.model, arguments.requests, arguments.tokens))


if __name__ == "__main__":
    main()
