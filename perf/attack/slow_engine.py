"""Throttle an engine process to a small share of a CPU core, and check that the watchdog does not kill it.

    python perf/attack/slow_engine.py MODEL.gguf --share 0.04 --tokens 2000 --limit 10

The watchdog of the server process kills an engine that makes no progress for `--limit` seconds. The script checks that
the watchdog does not kill an engine that is only slow:

1. A thread stops and continues the engine process (SIGSTOP, SIGCONT), so that the process gets `--share` of one core.
   At this speed, the prefill of the whole prompt (`--tokens` tokens) in a single step would take longer than `--limit`.
2. The throttled engine must compute the same answer as without throttling, and must not be killed.
3. The script then stops the engine process for good during a request, and measures the time until the watchdog kills
   it.
"""

import argparse
import asyncio
import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import SamplingParams
from helexa.neuron.engine_client.client import EngineClient

PERIOD = 0.1  # seconds from one SIGCONT to the next
ANSWER_TOKENS = 4


class Throttle:
    """Stops and continues a process repeatedly during the `with` block, so that it runs for `share` of the time."""

    def __init__(self, pid: int, share: float) -> None:
        self._pid, self._share = pid, share
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set() and psutil.pid_exists(self._pid):
            os.kill(self._pid, signal.SIGCONT)
            time.sleep(PERIOD * self._share)
            os.kill(self._pid, signal.SIGSTOP)
            self._ended.wait(PERIOD * (1 - self._share))
        if psutil.pid_exists(self._pid):
            os.kill(self._pid, signal.SIGCONT)


async def completion_of(client: EngineClient, prompt: list[int]) -> tuple[list[int], str | None]:
    """Generate a few tokens after `prompt`. Return the tokens, and the error that ended the generation, or None."""
    sampling = SamplingParams(temperature=0)
    outputs = [output async for output in client.generate(prompt, max_tokens=ANSWER_TOKENS, sampling=sampling)]
    return [token for output in outputs for token in output.tokens], outputs[-1].error


async def longest_silence(client: EngineClient, ended: asyncio.Event) -> float:
    """Wait until `ended` is set. Return the longest time, in seconds, between two reports of finished steps."""
    longest, reports, since = 0.0, client.reports, time.monotonic()
    while not ended.is_set():
        await asyncio.sleep(0.02)
        now = time.monotonic()
        if client.reports != reports:
            reports, since = client.reports, now
        longest = max(longest, now - since)
    return longest


async def measure(model: Path, share: float, tokens: int, limit: float) -> bool:
    """Run the test (see the module) with one model and print the results. Return whether the engine passed."""
    died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    options = EngineOptions(threads=1, kv_cache_mb=256, prefix_reuse="off")
    client = await EngineClient.start(model, options, step_seconds=limit, on_exit=died.set_result)
    try:
        draw = random.Random(1)
        prompt = [draw.randrange(1000, client.ready.vocab_size // 2) for _ in range(tokens)]
        process = psutil.Process(client.pid)

        begun = time.monotonic()
        expected, _ = await completion_of(client, prompt)
        print(f"{model.name}: {tokens} prompt tokens unthrottled in {time.monotonic() - begun:.1f} s")

        ended = asyncio.Event()
        silence = asyncio.create_task(longest_silence(client, ended))
        reports, begun, used_before = client.reports, time.monotonic(), sum(process.cpu_times()[:2])
        with Throttle(client.pid, share):
            throttled, error = await completion_of(client, prompt)
        ended.set()
        wall = time.monotonic() - begun
        if error is not None:
            print(f"  KILLED after {wall:.0f} s while it advanced: {await died}")
            return False
        used = sum(process.cpu_times()[:2]) - used_before
        print(
            f"  throttled to {used / wall:.1%} of a core: {wall:.0f} s in {client.reports - reports} steps, longest "
            f"step {await silence:.1f} s, limit {limit:g} s, never killed, same answer: {throttled == expected}"
        )

        request = asyncio.create_task(completion_of(client, prompt))
        while not client.running and not request.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGSTOP)
        begun = time.monotonic()
        reason = await asyncio.wait_for(died, 3 * limit + 10)
        print(f"  stopped for good: killed after {time.monotonic() - begun:.1f} s: {reason}")
        await request
        return throttled == expected
    finally:
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="+")
    parser.add_argument("--share", type=float, default=0.04, help="of one core (0.04)")
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt (2000)")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds without progress until it is killed (10)")
    arguments = parser.parse_args()
    results = [
        asyncio.run(measure(model, arguments.share, arguments.tokens, arguments.limit)) for model in arguments.model
    ]
    raise SystemExit(not all(results))


if __name__ == "__main__":
    main()
