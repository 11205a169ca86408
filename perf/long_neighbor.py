"""Measure what one long prompt does to the other clients of a server, as JSON lines.

usage: python perf/long_neighbor.py NAME=URL [NAME=URL ...] [--model MODEL] [--prompt 8192] [--every 2]

Each URL is a running server with the API of OpenAI, for example a node or llama.cpp's server, with a context for the
prompt and several slots. One client reads a stream. Another client sends a prompt of about `--prompt` tokens. Until its
first token arrives, a third client sends a short request of four tokens every `--every` seconds.

The output has one line per server:

    alone_ms        median gap between two events of the stream before the long prompt
    p99_ms, max_ms  gaps of the stream during the long prompt
    short_alone_ms  median time to the first token of short requests before the long prompt
    short_ms        median and maximum of this time during the long prompt
    long_s          time to the long prompt's first token
"""

import argparse
import asyncio
import itertools
import random
import time
from statistics import median

import aiohttp
from support.output import print_line, run
from support.servers import client_session

ALONE_EVENTS = 40
ALONE_REQUESTS = 5
SHORT_TOKENS = 4
WORDS = ("river", "stone", "light", "paper", "garden", "window", "bread", "winter", "music", "letter")

_serial = itertools.count(1)


def text(words: int) -> str:
    """Return a text of about `words` tokens that no server has seen before."""
    draw = random.Random(f"{time.time_ns()} {next(_serial)}")
    return f"Report {next(_serial)}: " + " ".join(draw.choice(WORDS) for _ in range(words))


async def arrivals(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str, tokens: int, times: list[float]
) -> None:
    """Stream a greedy answer, and append the time of each event to `times`."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    # llama.cpp's server closes idle connections without an announcement.
    headers = {"Connection": "close"}
    async with session.post(f"{url}/v1/completions", json=body | {"stream": True}, headers=headers) as response:
        if response.status != 200:
            raise SystemExit(f"the server answered HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            now = time.perf_counter()
            if line.startswith(b"data: {"):
                times.append(now)


async def first_token_ms(session: aiohttp.ClientSession, url: str, model: str, prompt: str, tokens: int) -> float:
    begin, times = time.perf_counter(), list[float]()
    await arrivals(session, url, model, prompt, tokens, times)
    return 1000 * (times[0] - begin)


async def measure(name: str, url: str, model: str, words: int, every: float) -> None:
    """Measure one server, and print its line."""
    async with client_session() as session:
        await first_token_ms(session, url, model, text(20), SHORT_TOKENS)  # loads the model
        times: list[float] = []
        stream = asyncio.create_task(arrivals(session, url, model, text(20), 100_000, times))
        while len(times) < ALONE_EVENTS:
            await asyncio.sleep(0.01)
            if stream.done():
                stream.result()
                raise SystemExit(f"{name}: the stream ended after {len(times)} events")
        alone = [await first_token_ms(session, url, model, text(20), SHORT_TOKENS) for _ in range(ALONE_REQUESTS)]
        before = len(times)
        long = asyncio.create_task(first_token_ms(session, url, model, text(words), 1))
        shorts: list[asyncio.Task[float]] = []
        while not (await asyncio.wait([long], timeout=every))[0]:
            shorts.append(asyncio.create_task(first_token_ms(session, url, model, text(20), SHORT_TOKENS)))
        during = times[before - 1 :]
        short_ms = await asyncio.gather(*shorts)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
    gaps = sorted(1000 * (later - earlier) for earlier, later in itertools.pairwise(during))
    print_line(
        server=name,
        alone_ms=median(1000 * (later - earlier) for earlier, later in itertools.pairwise(times[:ALONE_EVENTS])),
        p99_ms=gaps[int(0.99 * (len(gaps) - 1))] if gaps else None,
        max_ms=gaps[-1] if gaps else None,
        short_alone_ms=median(alone),
        short_ms=[median(short_ms), max(short_ms)] if short_ms else None,
        long_s=long.result() / 1000,
    )


async def measure_all(servers: list[str], model: str, words: int, every: float) -> None:
    for server in servers:
        name, _, url = server.partition("=")
        await measure(name, url.rstrip("/"), model, words, every)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("servers", nargs="+", metavar="NAME=URL")
    command.add_argument("--model", default="default")
    command.add_argument("--prompt", type=int, default=8192)
    command.add_argument("--every", type=float, default=2.0)
    arguments = command.parse_args()
    run(measure_all(arguments.servers, arguments.model, arguments.prompt, arguments.every))


if __name__ == "__main__":
    main()
