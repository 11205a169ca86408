"""Measure the time that the scheduler, step builder and sampler need per step, without a model, as JSON lines.

usage: python perf/step_costs.py [--steps 30] [--only NAME]

A simulated device returns random tokens at once, so the rows show only the cost of bookkeeping. A row has
the keys `name`, `median_ms` (milliseconds of CPU time per step), `first_ms` and `max_ms` (of all steps). The rows are:

    penalties frequency, repetition     build and apply the penalties of 16 sequences with 8,192 output tokens
    decode 64, 256, 512                 plan, build and commit decode steps of so many sequences
    waiting 256 x 32k, 256 x 1k         the same beside a chunked prompt, with 256 waiting prompts of that length
    waiting cached 256 x 32k            the same, with waiting prompts whose beginnings are cached
    waiting full 256 x 32k              the same, if the head of the queue needs more pages than are free
    users 256                           the same, with 256 waiting prompts of 256 principals
    long 16 x 32k                       decode steps of 16 sequences with 32k tokens
    ngram 32k                           decode steps of one sequence with drafts, after a prompt of 32k tokens
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from statistics import median

import msgspec
import torch

from helexa.neuron.engine.execution.step_builder_and_penalties import build_step, sampling_of
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_output_logprobs_and_pooling import Sampled
from helexa.neuron.ops.reference.reference_ops import ReferenceOps

VOCABULARY = 32_000
CHANCE = random.Random(1)


def tokens(count: int) -> list[int]:
    """Return `count` random tokens, some of which occur often."""
    return [int(VOCABULARY * CHANCE.random() ** 4) for _ in range(count)]


def request(number: int, prompt: list[int], salt: str = "", **sampling: float) -> Sequence:
    """Return a sequence that generates tokens without end."""
    params = msgspec.structs.replace(SamplingParams(temperature=0.0), **sampling)
    return Sequence(Generate(id=number, prompt=prompt, max_tokens=1 << 20, salt=salt, sampling=params))


class SimulatedEngine:
    """A scheduler whose steps yield random tokens."""

    def __init__(self, pages: int, **options: object) -> None:
        defaults = {"speculation": False, "max_waiting": 2048, "max_prefill_beside_decode": 0}
        self.options = EngineOptions(**(defaults | options))  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.options, PagePool(pages, 16))

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences."""
        for sequence in sequences:
            assert self.scheduler.add(sequence) is None

    def step(self) -> None:
        """Plan, build and commit one step."""
        plan = self.scheduler.plan()
        build_step(plan)
        sampled = [CHANCE.randrange(VOCABULARY) for entry in plan for _ in range(entry.samples + len(entry.drafts))]
        self.scheduler.commit(plan, sampled, 0.01)

    def start(self) -> None:
        """Run steps until all sequences decode."""
        while self.scheduler.waiting or not all(sequence.decoding for sequence in self.scheduler.running):
            self.step()


def penalties(**sampling: float) -> Callable[[], None]:
    sequences = [request(number, [1], "", **sampling) for number in range(16)]
    for sequence in sequences:
        sequence.tokens += tokens(8192)
    logits = torch.zeros(16, VOCABULARY)
    ops = ReferenceOps(torch.device("cpu"), torch.float32)

    def step() -> None:
        Sampled(ops, logits, sampling_of([(sequence, ()) for sequence in sequences])).read()
        for sequence in sequences:
            sequence.tokens.append(CHANCE.randrange(VOCABULARY))

    return step


def decode(count: int, length: int = 64) -> Callable[[], None]:
    engine = SimulatedEngine(count * (length // 16 + 64), max_sequences=count, max_step_tokens=4096)
    engine.add(*(request(number, tokens(length)) for number in range(count)))
    engine.start()
    return engine.step


def waiting(
    count: int, length: int, *, cached: bool = False, pages: int = 1 << 18, users: int = 1
) -> Callable[[], None]:
    engine = SimulatedEngine(pages, max_sequences=64, max_step_tokens=512)
    prefix = tokens(length)
    if cached:
        engine.add(request(-3, prefix))
        engine.start()
    engine.add(*(request(-number - 10, tokens(64), f"user{number % users}") for number in range(4)))
    engine.start()
    engine.add(request(-1, tokens(200_000), "user0"))
    engine.step()
    prompts = [prefix[: length - 8] + tokens(8 * 600) if cached else tokens(length) for _ in range(count)]
    engine.add(*(request(number, prompt, f"user{number % users}") for number, prompt in enumerate(prompts)))
    return engine.step


def ngram(length: int) -> Callable[[], None]:
    engine = SimulatedEngine(1 << 13, speculation=True, max_step_tokens=4096)
    engine.add(request(0, tokens(length)))
    while engine.scheduler.waiting or engine.scheduler.running[0].generated < 1:
        engine.step()
    return engine.step


ROWS: dict[str, Callable[[], Callable[[], None]]] = {
    "penalties frequency": lambda: penalties(frequency_penalty=0.5),
    "penalties repetition": lambda: penalties(repetition_penalty=1.1),
    "decode 64": lambda: decode(64),
    "decode 256": lambda: decode(256),
    "decode 512": lambda: decode(512),
    "waiting 256 x 32k": lambda: waiting(256, 32768),
    "waiting 256 x 1k": lambda: waiting(256, 1024),
    "waiting cached 256 x 32k": lambda: waiting(256, 32768, cached=True),
    "waiting full 256 x 32k": lambda: waiting(256, 32768, pages=14_000),
    "users 256": lambda: waiting(256, 1024, users=256),
    "long 16 x 32k": lambda: decode(16, 32768),
    "ngram 32k": lambda: ngram(32768),
}


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--steps", type=int, default=30)
    command.add_argument("--only", default="", help="measure only rows whose name contains this text")
    arguments = command.parse_args()
    torch.set_num_threads(1)
    for name, prepare in ROWS.items():
        if arguments.only in name:
            step = prepare()
            times: list[float] = []
            for _ in range(arguments.steps):
                begin = time.process_time()
                step()
                times.append((time.process_time() - begin) * 1e3)
            row = {"median_ms": median(times), "first_ms": times[0], "max_ms": max(times)}
            print(json.dumps({"name": name} | {key: round(value, 3) for key, value in row.items()}), flush=True)


if __name__ == "__main__":
    main()
