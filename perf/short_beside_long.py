"""Measure short requests during the prefill of a long prompt, and how much they delay the prompt, as JSON lines.

usage: python perf/short_beside_long.py [MODEL] [--threads 2] [--rounds 3] [--prompt 16384] [--every 2]

A short request has `--short` prompt tokens and `--tokens` output tokens. The long prompt has `--prompt` tokens and one
output token. A principal is the account and key of a request. Each round measures four rows:

    own         short requests alone
    alone       the long prompt alone
    same        the long prompt, and a short request every `--every` seconds, from the same principal
    other       the same as `same`, but the short requests come from another principal

The output has these values:

    long_s          time to the long prompt's first token
    prefill_tok_s   all prompt tokens, short and long, divided by the time until all requests have ended
    chunk_ms        time of a prefill chunk: the time of the long prompt alone per `max_step_tokens` tokens
    step_ms         time of the long prompt alone per engine step

The verdict is the 95th percentile of the short requests' times in `same` or `other`, divided by the sum of three
`chunk_ms` and the median time of a short request alone. It must be at most 1.
"""

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from support.output import print_line, print_verdict, run
from support.rows import prompt
from support.scenario import GREEDY, engine, parser, require_context

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine_client.client import EngineClient

CHUNKS = 3
"""Number of prefill chunks of the long prompt for which a short request may have to wait."""

OWN_REQUESTS = 5


@dataclass(frozen=True)
class Load:
    """Sizes and times of the requests of the benchmark.

    Attributes:
        prompt: number of prompt tokens of the long request.
        short: number of prompt tokens of a short request.
        tokens: number of output tokens of a short request.
        every: seconds between short requests.
    """

    prompt: int
    short: int
    tokens: int
    every: float


@dataclass
class Row:
    """The measurements of one row (see the module), with one value per request or round.

    Attributes:
        short: duration of each short request, in seconds.
        long: duration of the long request in each round, in seconds.
        prefill_tok_s: prompt tokens of all requests per second, in each round.
        step_ms: average duration of an engine step in each round, in milliseconds.
    """

    short: list[float] = field(default_factory=list[float])
    long: list[float] = field(default_factory=list[float])
    prefill_tok_s: list[float] = field(default_factory=list[float])
    step_ms: list[float] = field(default_factory=list[float])


async def generate(client: EngineClient, length: int, tokens: int, salt: str = "") -> float:
    """Generate `tokens` tokens after a random prompt of `length` tokens. Return the seconds until the last token."""
    requested = time.perf_counter()
    async with aclosing(client.generate(prompt(length), max_tokens=tokens, sampling=GREEDY, salt=salt)) as stream:
        async for output in stream:
            if output.error:
                raise SystemExit(f"the engine refused: {output.error}")
    return time.perf_counter() - requested


async def measure_long(client: EngineClient, row: Row, load: Load, salt: str | None) -> None:
    """Run the long request and add its measurements to `row`.

    Args:
        client: the engine.
        row: the row to which the measurements are added.
        load: sizes and times of the requests.
        salt: identifies the principal (account and key) of short requests, which are sent during the long request. None
            sends no short requests.
    """
    begin, reports = time.perf_counter(), client.reports
    long = asyncio.create_task(generate(client, load.prompt, 1))
    shorts: list[asyncio.Task[float]] = []
    while salt is not None:
        done, _ = await asyncio.wait([long], timeout=load.every)
        if done:
            break
        shorts.append(asyncio.create_task(generate(client, load.short, load.tokens, salt)))
    row.long.append(await long)
    row.step_ms.append(1000 * row.long[-1] / (client.reports - reports))
    row.short += await asyncio.gather(*shorts)
    row.prefill_tok_s.append((load.prompt + len(shorts) * load.short) / (time.perf_counter() - begin))


async def measure(model: Path, threads: int, rounds: int, load: Load) -> None:
    """Run all rounds on one engine, then print the results."""
    alone_secs: list[float] = []
    rows: dict[str, Row] = {"alone": Row(), "same": Row(), "other": Row()}
    salts = {"alone": None, "same": "", "other": "other"}
    async with engine(model, EngineOptions(threads=threads)) as client:
        require_context(client, load.prompt + 1)
        for _ in range(rounds):
            alone_secs += [await generate(client, load.short, load.tokens) for _ in range(OWN_REQUESTS)]
            for name, row in rows.items():
                await measure_long(client, row, load, salts[name])
    chunk = median(rows["alone"].long) / (load.prompt / client.options.max_step_tokens)
    print_line(row="own", p50_ms=1000 * median(alone_secs), runs=alone_secs)
    for name, row in rows.items():
        short = {"p50_ms": 1000 * median(row.short), "p95_ms": 1000 * p95(row.short)} if row.short else {}
        print_line(row=name, long_s=median(row.long), prefill_tok_s=median(row.prefill_tok_s), runs=row.long, **short)
    print_line(row="chunk_ms", value=1000 * chunk, step_ms=median(rows["alone"].step_ms))
    bound = CHUNKS * chunk + median(alone_secs)
    slowest = max(p95(row.short) for row in rows.values() if row.short)
    ratio = slowest / bound
    print_verdict("p95 of short requests / (3 chunks + own time)", ratio, "<= 1", ratio <= 1)


def p95(values: list[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def main() -> None:
    command = parser(__doc__)
    command.set_defaults(rounds=3)
    command.add_argument("--prompt", type=int, default=16384)
    command.add_argument("--short", type=int, default=32)
    command.add_argument("--tokens", type=int, default=10)
    command.add_argument("--every", type=float, default=2.0)
    arguments = command.parse_args()
    load = Load(arguments.prompt, arguments.short, arguments.tokens, arguments.every)
    run(measure(arguments.model, arguments.threads, arguments.rounds, load))


if __name__ == "__main__":
    main()
