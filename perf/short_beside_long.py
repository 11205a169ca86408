"""Measure short requests during the prefill of a long prompt, and their effect on the prompt, as JSON lines.

usage: python perf/short_beside_long.py [MODEL] [--threads 2] [--rounds 3] [--prompt 16384] [--every 2]

Each round measures in turns: short requests alone (`own`), the long prompt alone (`alone`), and the long prompt with a
short request every `--every` seconds, all from one principal (`same`) or the short requests from another principal
(`other`). A short request has `--short` prompt tokens and `--tokens` output tokens; the long prompt has one output
token.

`long_s` is the time to the long prompt's first token. `prefill_tok_s` is the number of all prompt tokens, short and
long, divided by the time until all requests have ended. `chunk_ms` is the time of the long prompt alone per
`max_step_tokens` tokens; `step_ms` is the same time per engine step.

The verdict is the 95th percentile of the short requests' times, divided by three chunks plus the median time of a short
request alone.
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

from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine_client.client import EngineClient

CHUNKS = 3
"""Number of prefill chunks of the long prompt for which a short request may have to wait."""

OWN_REQUESTS = 5


@dataclass(frozen=True)
class Load:
    """The requests of the benchmark.

    `prompt` and `short` are the prompt tokens of a long and a short request. `tokens` are the output tokens of a short
    request. `every` is the number of seconds between short requests.
    """

    prompt: int
    short: int
    tokens: int
    every: float


@dataclass
class Row:
    """The measurements of one output row, with one value per request or round.

    `short` and `long` are durations of short requests and of the long request in seconds. `prefill_tok_s` is the total
    prefill rate. `step_ms` is the duration of an engine step in milliseconds.
    """

    short: list[float] = field(default_factory=list[float])
    long: list[float] = field(default_factory=list[float])
    prefill_tok_s: list[float] = field(default_factory=list[float])
    step_ms: list[float] = field(default_factory=list[float])


async def generate(client: EngineClient, length: int, tokens: int, salt: str = "") -> float:
    """Generate `tokens` tokens after a prompt of `length` tokens. Return the seconds until the last token."""
    requested = time.perf_counter()
    async with aclosing(client.generate(prompt(length), max_tokens=tokens, sampling=GREEDY, salt=salt)) as stream:
        async for output in stream:
            if output.error:
                raise SystemExit(f"the engine refused: {output.error}")
    return time.perf_counter() - requested


async def measure_long(client: EngineClient, row: Row, load: Load, salt: str | None) -> None:
    """Run the long request and add its measurements to `row`.

    If `salt` is not None, short requests with this salt are sent during the long request. The salt identifies the
    principal (account and key).
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
