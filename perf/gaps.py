"""Measure how much a long prompt delays the tokens of streams that decode at the same time, as JSON lines.

usage: python perf/gaps.py [MODEL] [--threads 2] [--rounds 5] [--streams 8] [--prompt 6000]

A prompt of `--prompt` tokens arrives while `--streams` streams decode. A gap is the time in milliseconds between two
arrivals of tokens in one stream. The script prints a line for each of three groups of gaps, over all rounds:

    quiet       gaps before the long prompt arrives
    window      gaps from the arrival of the long prompt until its first token
    overall     all gaps, also those after the first token of the long prompt

`ttft_ms` is the long prompt's time to first token. `window_p99_over_quiet_p50` is the 99th percentile of the `window`
gaps divided by the median of the `quiet` gaps. The verdict is the 99th percentile of the gaps divided by their median,
for `window` or for `overall`: the larger of the two values must be below 4.
"""

import asyncio
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from support.output import print_line, print_verdict, run
from support.rows import prompt
from support.scenario import TimedAnswer, ask, engine, parser, require_context

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine_client.client import EngineClient

QUIET_TOKENS = 100
STREAM_CONTEXT = 64
THRESHOLD = 4.0
POLL_SECONDS = 0.001


@dataclass
class Gaps:
    """Times between consecutive tokens of a stream in milliseconds, over all streams and rounds.

    Attributes:
        quiet: gaps before the long prompt arrives.
        window: gaps from the arrival of the long prompt until its first token.
        overall: all gaps.
        ttft: the long prompt's time to first token in each round, in milliseconds.
    """

    quiet: list[float] = field(default_factory=list[float])
    window: list[float] = field(default_factory=list[float])
    overall: list[float] = field(default_factory=list[float])
    ttft: list[float] = field(default_factory=list[float])

    def add(self, streams: list[TimedAnswer], long: TimedAnswer) -> None:
        """Add the gaps of one round.

        Args:
            streams: timings of the decoding streams.
            long: timing of the request with the long prompt.
        """
        begin, end = long.requested_at, long.arrivals[0]
        self.ttft.append(long.ttft_ms)
        start = max(stream.arrivals[0] for stream in streams)  # from here on, all streams decode
        for stream in streams:
            times = [time for time in stream.arrivals if time >= start]
            for earlier, later in itertools.pairwise(times):
                gap = 1000 * (later - earlier)
                self.overall.append(gap)
                if later <= begin:
                    self.quiet.append(gap)
                elif earlier < end:
                    self.window.append(gap)


async def round_of(client: EngineClient, streams: int, length: int) -> tuple[list[TimedAnswer], TimedAnswer]:
    """Start the streams and then the long prompt. Cancel the streams 100 tokens after the long prompt's first token.

    Args:
        client: the engine.
        streams: number of streams.
        length: number of tokens of the long prompt.

    Returns:
        The timings of the streams, and the timing of the request with the long prompt.
    """
    answers = [TimedAnswer() for _ in range(streams)]
    longest = client.ready.context_length - STREAM_CONTEXT
    tasks = [asyncio.create_task(ask(client, prompt(STREAM_CONTEXT), longest, answer=answer)) for answer in answers]
    try:
        await wait_for_tokens(answers, [QUIET_TOKENS] * streams, tasks)
        long = await ask(client, prompt(length), 1)
        await wait_for_tokens(answers, [len(answer.tokens) + QUIET_TOKENS for answer in answers], tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers, long


async def wait_for_tokens(
    answers: list[TimedAnswer], tokens: list[int], tasks: list[asyncio.Task[TimedAnswer]]
) -> None:
    """Wait until each stream in `answers` has as many tokens as `tokens` names. Exit if a stream ends earlier."""
    while any(len(answer.tokens) < count for answer, count in zip(answers, tokens, strict=True)):
        for task in tasks:
            if task.done():
                task.result()
                raise SystemExit("a stream ended before the prompt was through: the model's context is too short")
        await asyncio.sleep(POLL_SECONDS)


async def measure(model: Path, threads: int, rounds: int, streams: int, length: int) -> None:
    """Run all rounds on one engine, then print the results."""
    gaps = Gaps()
    async with engine(model, EngineOptions(threads=threads)) as client:
        require_context(client, length + 1)
        for _ in range(rounds):
            gaps.add(*await round_of(client, streams, length))
    for row, gaps_ms in (("quiet", gaps.quiet), ("window", gaps.window), ("overall", gaps.overall)):
        print_line(row=row, p50_ms=median(gaps_ms), p99_ms=p99(gaps_ms), max_ms=max(gaps_ms), gaps=len(gaps_ms))
    print_line(row="prompt", ttft_ms=median(gaps.ttft), runs=gaps.ttft)
    print_line(row="window_p99_over_quiet_p50", value=p99(gaps.window) / median(gaps.quiet))
    ratio = max(p99(gaps_ms) / median(gaps_ms) for gaps_ms in (gaps.window, gaps.overall))
    print_verdict("inter-token gap, p99 / p50", ratio, f"< {THRESHOLD}", ratio < THRESHOLD)


def p99(values: list[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[-1]


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--streams", type=int, default=8)
    command.add_argument("--prompt", type=int, default=6000)
    arguments = command.parse_args()
    run(measure(arguments.model, arguments.threads, arguments.rounds, arguments.streams, arguments.prompt))


if __name__ == "__main__":
    main()
