"""Measure what the prompts on disk save after a restart of the engine, as JSON lines.

usage: python perf/saved_prompts.py [MODEL] [--threads 2] [--rounds 3] [--prompt 12000] [--streams 8]

Each round computes a new prompt of `--prompt` random tokens (cold), asks again (memory), ends the engine, starts
another one, and asks again (disk). The times are those to the first token. `disk_s` contains no start of the engine.
`read_s` is the time to read the saved files by themselves, from the page cache of the operating system.

The verdicts are the time from disk divided by the cold time, and by the sum of the time from memory and `read_s`. The
last verdict is the 99th percentile of the gaps of `--streams` streams while a prompt is read and its pages are written,
divided by that without a disk; `--streams 0` leaves it out.
"""

import asyncio
import itertools
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from support.output import print_line, print_verdict, run
from support.rows import prompt
from support.scenario import TimedAnswer, ask, engine, parser, require_context

from helexa.neuron.engine.ipc.engine_options import EngineOptions

DISK_MB = 20_000
STREAM_TOKENS = 120
POLL_SECONDS = 0.01
SETTLE_SECONDS = 2.0
COLD_THRESHOLD, READ_THRESHOLD, GAP_THRESHOLD = 0.05, 1.5, 1.1


def seconds_to_read(folder: Path) -> float:
    begin = time.perf_counter()
    for path in folder.rglob("*.segment"):
        path.read_bytes()
    return time.perf_counter() - begin


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.segment"))


async def until_saved(folder: Path) -> None:
    """Wait until an idle engine has saved its prompts. Its end would cut this off after two seconds."""
    latest, size = -1, 0
    while size != latest or not size:
        latest = size
        await asyncio.sleep(SETTLE_SECONDS)
        size = bytes_on_disk(folder)


async def restart(model: Path, options: EngineOptions, tokens: list[int], folder: Path) -> dict[str, float]:
    """Return the times to the first token of one round, in seconds."""
    async with engine(model, options) as client:
        require_context(client, len(tokens) + 1)
        cold = await ask(client, tokens, 1)
        memory = await ask(client, tokens, 1)
        await until_saved(folder)
    read_secs = seconds_to_read(folder)
    async with engine(model, options) as client:
        disk = await ask(client, tokens, 1)
        print_line(cached=disk.cached, of=len(tokens), disk_tokens=client.disk.tokens)
    times = {"cold": cold.ttft_ms, "memory": memory.ttft_ms, "disk": disk.ttft_ms}
    return {name: ms / 1000 for name, ms in times.items()} | {"read": read_secs}


async def p99_gap(model: Path, options: EngineOptions, saved: list[int], streams: int) -> float:
    """Return the 99th percentile of the gaps of `streams` streams, in milliseconds.

    The streams begin with prompts that are written to disk. Meanwhile another client asks for the prompt `saved`.
    """
    async with engine(model, options) as client:
        answers = [TimedAnswer() for _ in range(streams)]
        tasks = [asyncio.create_task(ask(client, prompt(200), STREAM_TOKENS, answer=answer)) for answer in answers]
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if all(len(answer.arrivals) > 10 for answer in answers):
                break
        for _ in range(4):  # each ends at once; its pages are written while the streams go on
            await ask(client, prompt(200), 1)
        if options.prefix_disk_mb:
            await ask(client, saved, 1)
        await asyncio.gather(*tasks)
    gaps = sorted(
        1000 * (later - earlier) for answer in answers for earlier, later in itertools.pairwise(answer.arrivals[10:])
    )
    return gaps[int(0.99 * (len(gaps) - 1))]


async def measure(model: Path, threads: int, rounds: int, length: int, streams: int) -> None:
    """Run all rounds, then print the results."""
    with tempfile.TemporaryDirectory(prefix="helexa-prompts-") as folder:
        # The kernels stay in the usual cache; only the prompts are new.
        (Path(folder) / "kernels").symlink_to(Path.home() / ".cache/helexa/kernels")
        os.environ["HELEXA_CACHE"] = folder
        options = EngineOptions(threads=threads, prefix_disk_mb=DISK_MB, max_sequences=16)
        times: list[dict[str, float]] = []
        tokens: list[int] = []
        for _ in range(rounds):
            tokens = prompt(length)
            times.append(await restart(model, options, tokens, Path(folder)))
            print_line(**{f"{name}_s": secs for name, secs in times[-1].items()})
        medians = {name: median(row[name] for row in times) for name in times[0]}
        print_line(row="median", **{f"{name}_s": secs for name, secs in medians.items()})
        ratio = medians["disk"] / medians["cold"]
        print_verdict("disk / cold", ratio, f"<= {COLD_THRESHOLD}", ratio <= COLD_THRESHOLD)
        ratio = medians["disk"] / (medians["memory"] + medians["read"])
        print_verdict("disk / (memory + read)", ratio, f"<= {READ_THRESHOLD}", ratio <= READ_THRESHOLD)
        if not streams:
            return
        without = EngineOptions(threads=threads, max_sequences=16)
        pairs = [
            (await p99_gap(model, options, tokens, streams), await p99_gap(model, without, tokens, streams))
            for _ in range(rounds)
        ]
        ratio = median(with_disk for with_disk, _ in pairs) / median(alone for _, alone in pairs)
        print_line(row="p99 gaps", with_disk_ms=[pair[0] for pair in pairs], alone_ms=[pair[1] for pair in pairs])
        print_verdict("p99 gap with disk / without", ratio, f"<= {GAP_THRESHOLD}", ratio <= GAP_THRESHOLD)


def main() -> None:
    command = parser(__doc__)
    command.set_defaults(rounds=3)
    command.add_argument("--prompt", type=int, default=12_000)
    command.add_argument("--streams", type=int, default=8)
    arguments = command.parse_args()
    run(measure(arguments.model, arguments.threads, arguments.rounds, arguments.prompt, arguments.streams))


if __name__ == "__main__":
    main()
