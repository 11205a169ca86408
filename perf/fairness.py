"""Measure how much the clients of one principal slow down the requests of another principal, as JSON lines.

usage: python perf/fairness.py [MODEL] [--crowd 64] [--rounds 3] [--answers 5] [--tokens 48] [--together]

A principal is the account and key that requests are billed to. MODEL is a value of `neuron --model`. The node runs in
its own process. The requests name their principal in the headers that a gateway would set.

There are two principals:

* The heavy principal has one client or `--crowd` clients. Each client sends a new request as soon as its last response
  ends. The lengths of the responses vary from half of `--tokens` to one and a half times `--tokens`.
* The light principal sends one request after the other. Its responses are streamed and greedy and have exactly
  `--tokens` tokens.

Each round measures `--answers` responses to the light principal while the heavy principal has one client, then the same
number while it has `--crowd` clients. There is one JSON line for each number of clients, with these medians:

    seconds         time from the light principal's request to the last token of its response
    ttft_ms         time from the light principal's request to the first token of its response
    others_tok_s    total rate of the heavy principal's responses that ended during the measurement

The verdict is `seconds` with `--crowd` clients divided by `seconds` with one client. It must be at most 2. With
`--together`, all requests have the same principal, for comparison.
"""

import argparse
import asyncio
import itertools
import random
import time
from dataclasses import dataclass, field
from statistics import median

import aiohttp
from support.output import print_line, print_verdict, run
from support.servers import StreamTiming, client_session, node, stream_completion

THRESHOLD = 2.0

_serial = itertools.count(1)
_lengths = random.Random(1)


@dataclass
class Row:
    """Measurements with a given number of clients of the heavy principal.

    Attributes:
        answers: timings of the responses to the light principal.
        others_tok_s: total rate of the heavy principal's clients in each round, in tokens per second.
    """

    answers: list[StreamTiming] = field(default_factory=list[StreamTiming])
    others_tok_s: list[float] = field(default_factory=list[float])

    @property
    def seconds(self) -> list[float]:
        """Duration of each response to the light principal, in seconds."""
        return [timing.last - timing.requested for timing in self.answers]


def session_of(account: str) -> aiohttp.ClientSession:
    """Return an HTTP session whose requests have the headers of the principal with the account `account`."""
    session = client_session()
    session.headers.update({"x-helexa-account-id": account, "x-helexa-key-id": "benchmark"})
    return session


def prompt() -> str:
    """Return a prompt that no earlier request of this process has used."""
    return f"Story number {next(_serial)}, told by an old sailor:"


async def keep_asking(
    session: aiohttp.ClientSession, url: str, model: str, tokens: int, ended: list[StreamTiming]
) -> None:
    """Send one request after the other until canceled. Append the timing of each complete response to `ended`."""
    while True:
        ended.append(
            await stream_completion(session, url, model, prompt(), _lengths.randint(tokens // 2, tokens * 3 // 2))
        )


async def measure_with_crowd(
    crowd_size: int,
    heavy: aiohttp.ClientSession,
    light: aiohttp.ClientSession,
    url: str,
    model: str,
    tokens: int,
    count: int,
) -> tuple[list[StreamTiming], float]:
    """Measure responses to the light principal while `crowd_size` clients of the heavy principal send requests.

    Args:
        crowd_size: number of clients of the heavy principal.
        heavy: HTTP session of the heavy principal.
        light: HTTP session of the light principal.
        url: base URL of the node.
        model: id of the model.
        tokens: number of tokens of each response to the light principal.
        count: number of measured responses.

    Returns:
        The timings of the measured responses, and the total rate of the heavy principal's clients in tokens per second.
    """
    ended: list[StreamTiming] = []
    crowd = [asyncio.create_task(keep_asking(heavy, url, model, tokens, ended)) for _ in range(crowd_size)]
    try:
        await stream_completion(light, url, model, prompt(), tokens)
        begin, ended_before = time.perf_counter(), len(ended)
        answers = [await stream_completion(light, url, model, prompt(), tokens) for _ in range(count)]
        others_tok_s = sum(timing.tokens for timing in ended[ended_before:]) / (time.perf_counter() - begin)
    finally:
        for task in crowd:
            task.cancel()
        failures = [
            error for error in await asyncio.gather(*crowd, return_exceptions=True) if isinstance(error, SystemExit)
        ]
    if failures:
        raise failures[0]
    return answers, others_tok_s


async def measure(model: str, crowd: int, rounds: int, count: int, tokens: int, together: bool) -> None:
    """Measure alternately with one client and with many clients of the heavy principal, then print the results."""
    rows = {1: Row(), crowd: Row()}
    accounts = ("heavy", "heavy" if together else "light")
    async with (
        session_of(accounts[0]) as heavy,
        session_of(accounts[1]) as light,
        node(model, light) as (_, url, served),
    ):
        for crowd_size in rows:
            await measure_with_crowd(crowd_size, heavy, light, url, served, 8, 1)  # warm up
        for _ in range(rounds):
            for crowd_size, row in rows.items():
                answers, tok_s = await measure_with_crowd(crowd_size, heavy, light, url, served, tokens, count)
                row.answers += answers
                row.others_tok_s.append(tok_s)
    for crowd_size, row in rows.items():
        print_line(
            row=f"beside@{crowd_size}",
            seconds=median(row.seconds),
            ttft_ms=median(1000 * (timing.first - timing.requested) for timing in row.answers),
            others_tok_s=median(row.others_tok_s),
            runs=row.seconds,
        )
    ratio = median(rows[crowd].seconds) / median(rows[1].seconds)
    print_verdict(f"latency beside {crowd} clients / beside one", ratio, f"<= {THRESHOLD}", ratio <= THRESHOLD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="helexa/small")
    parser.add_argument("--crowd", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--together", action="store_true")
    arguments = parser.parse_args()
    run(
        measure(
            arguments.model, arguments.crowd, arguments.rounds, arguments.answers, arguments.tokens, arguments.together
        )
    )


if __name__ == "__main__":
    main()
