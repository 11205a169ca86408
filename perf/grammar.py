"""Measure how much a grammar that constrains the output slows down decode steps, as JSON lines.

usage: python perf/grammar.py MODEL [--streams 8] [--threads N] [--rounds 40]

In one process, two batches with the same prompts run alternately, five steps at a time. One batch has a grammar (a JSON
Schema of strings and numbers in arrays), the other has none. The script prints four lines: for greedy sampling and for
temperature 0.8, each without speculation and with the engine's default for speculation. A line has these keys:

    plain_ms, guided_ms             median milliseconds per token of a stream, without and with the grammar
    plain_cpu_ms, guided_cpu_ms     the same in CPU time
    ratio                           median over the rounds of (time with the grammar / time without the grammar)
    within_bar                      whether the ratio is at most 1.05
"""

import argparse
import itertools
import json
import os
import time
from statistics import median

from helexa.neuron.engine.ipc import ENVIRONMENT

os.environ.update(ENVIRONMENT | os.environ)  # same environment as an engine process

import msgspec
import torch
from llguidance import LLMatcher
from support.local_model import local_path
from support.rows import prompt

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.grammar_matcher import GrammarMatcher, read_vocabulary
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.ops.kernel_header import PAGE_SIZE

THRESHOLD = 1.05
STEPS = 5
NAMES = [f"list_{number}" for number in range(200)]
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "array", "minItems": 3, "items": {"type": ["string", "number"], "maxLength": 60}}
        for name in NAMES
    },
    "required": NAMES,
    "additionalProperties": False,
}


class Batch:
    """Streams that decode in one batch, either all with a grammar or all without a grammar."""

    def __init__(self, runner: Runner, options: EngineOptions, requests: list[Sequence]) -> None:
        self._runner = runner
        self._requests = requests
        self._scheduler = Scheduler(options, PagePool(runner.facts.kv_pages // 2, PAGE_SIZE))
        for sequence in requests:
            self._scheduler.add(sequence)
        while any(sequence.generated < 3 * STEPS for sequence in requests):
            self.step()
        self.clock: list[float] = []
        self.processor: list[float] = []

    def step(self) -> None:
        """Run one decode step of all streams in the batch."""
        plan = self._scheduler.plan()
        self._scheduler.commit(plan, self._runner.launch(build_step(plan)).read().tokens)

    def round(self) -> None:
        """Run the `STEPS` decode steps of one round, and record their time per token."""
        begun = sum(sequence.generated for sequence in self._requests)
        clock, processor = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            self.step()
        clock, processor = time.perf_counter() - clock, time.process_time() - processor
        tokens = (sum(sequence.generated for sequence in self._requests) - begun) / len(self._requests)
        self.clock.append(clock * 1e3 / tokens)
        self.processor.append(processor * 1e3 / tokens)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("model")
    command.add_argument("--streams", type=int, default=8)
    command.add_argument("--threads", type=int, default=0)
    command.add_argument("--rounds", type=int, default=40)
    arguments = command.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    path = local_path(arguments.model)
    options = EngineOptions(threads=arguments.threads)
    runner = load_once(path, options)
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})
    matcher = LLMatcher(read_vocabulary(path, runner.facts.vocab_size), grammar)
    for temperature, guessing in itertools.product((0.0, 0.8), (False, options.speculation)):
        prompts = [prompt(64) for _ in range(arguments.streams)]

        def batch(
            guided: bool,
            prompts: list[list[int]] = prompts,
            temperature: float = temperature,
            guessing: bool = guessing,
        ) -> Batch:
            requests: list[Sequence] = []
            for number, tokens in enumerate(prompts):
                sampling = SamplingParams(temperature=temperature, seed=number)
                request = Generate(id=number, prompt=tokens, max_tokens=1 << 20, sampling=sampling)
                requests.append(Sequence(request, matcher=GrammarMatcher(matcher) if guided else None))
            return Batch(runner, msgspec.structs.replace(options, speculation=guessing), requests)

        plain, guided = batch(False), batch(True)
        ratios: list[float] = []
        for number in range(arguments.rounds):
            first, second = (plain, guided) if number % 2 else (guided, plain)
            first.round()
            second.round()
            ratios.append(guided.clock[-1] / plain.clock[-1])
        print(
            json.dumps(
                {
                    "temperature": temperature,
                    "speculation": guessing,
                    "streams": arguments.streams,
                    "kernels": runner.ops.name,
                    "plain_ms": round(median(plain.clock), 2),
                    "guided_ms": round(median(guided.clock), 2),
                    "plain_cpu_ms": round(median(plain.processor), 2),
                    "guided_cpu_ms": round(median(guided.processor), 2),
                    "ratio": round(median(ratios), 3),
                    "within_threshold": median(ratios) <= THRESHOLD,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
