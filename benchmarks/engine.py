"""The engine alone, in process: decode at several batch sizes and prefill, as JSON lines beside the machine's ceiling.

usage: python benchmarks/engine.py MODEL [--rows decode@1,decode@16,prefill@512] [--dtype auto] [--threads N]

MODEL is a path to a GGUF file or a Hugging Face folder, or any model id that a node takes (`helexa/small`). Every row
has the keys `engine`, `row` and `tok_s` (all sequences together), and `ceiling_tok_s`: what the measured read bandwidth
(decode) and matrix rate of this machine allow. Decode starts at 64 tokens of context and takes 64 greedy steps,
scheduler and sampler included.
"""

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from statistics import median

from helexa.neuron.engine.threads import ENVIRONMENT

os.environ.update(ENVIRONMENT | os.environ)  # as an engine process has it

import torch

from helexa.core.source import ModelSource
from helexa.neuron.config import read_config
from helexa.neuron.engine.messages import EngineOptions, Generate, SamplingParams
from helexa.neuron.engine.pages import PagePool
from helexa.neuron.engine.runner import PAGE_SIZE, Runner
from helexa.neuron.engine.scheduler import Scheduler
from helexa.neuron.engine.sequence import Sequence
from helexa.neuron.registry import BUILTIN_MODELS
from helexa.neuron.sources import Sources

ROWS = "decode@1,decode@4,decode@8,decode@16,decode@32,prefill@512"
CONTEXT, STEPS = 64, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    options = EngineOptions(dtype=arguments.dtype)
    runner = Runner(local_path(arguments.model), options)
    bandwidth, flops = read_bandwidth(), matmul_rate(runner.ops.dtype)
    parameters = runner.facts.parameters
    measure(runner, options, 1, CONTEXT, 4)  # warm up
    for row in arguments.rows.split(","):
        kind, _, number = row.partition("@")
        count = int(number)
        if kind == "decode":
            rate = measure(runner, options, count, CONTEXT, STEPS)
            ceiling = min(count * bandwidth / runner.facts.weight_bytes, flops / (2 * parameters))
        else:
            rate = max(prefill(runner, options, count) for _ in range(2))
            ceiling = flops / (2 * parameters)
        line = {"engine": "helexa", "row": row, "tok_s": round(rate, 1), "ceiling_tok_s": round(ceiling, 1)}
        print(json.dumps(line | {"kernels": runner.ops.name}), flush=True)


def local_path(model: str) -> Path:
    """Where the model lies, fetched if it is an id whose file is not here yet."""
    if Path(model).exists():
        return Path(model)
    source = ModelSource.parse(BUILTIN_MODELS.get(model, model))
    return asyncio.run(Sources(read_config(None)).resolve(source, quant=None, progress=lambda *_: None))


def measure(runner: Runner, options: EngineOptions, sequences: int, context: int, steps: int) -> float:
    """Tokens per second of `steps` decode steps."""
    scheduler = start(runner, options, sequences, context, steps + 1)
    while any(sequence.generated == 0 for sequence in (*scheduler.running, *scheduler.waiting)):
        step(runner, scheduler)
    begin = time.perf_counter()
    for _ in range(steps):
        step(runner, scheduler)
    return sequences * steps / (time.perf_counter() - begin)


def prefill(runner: Runner, options: EngineOptions, length: int) -> float:
    """Prompt tokens per second until the first token."""
    scheduler = start(runner, options, 1, length, 1)
    begin = time.perf_counter()
    while not scheduler.idle:
        step(runner, scheduler)
    return length / (time.perf_counter() - begin)


def start(runner: Runner, options: EngineOptions, sequences: int, length: int, max_tokens: int) -> Scheduler:
    scheduler = Scheduler(options, PagePool(runner.facts.kv_pages, PAGE_SIZE))
    for number in range(sequences):
        prompt = [1000 + i for i in range(length)]
        greedy = SamplingParams(temperature=0)
        scheduler.add(Sequence(Generate(id=number, prompt=prompt, max_tokens=max_tokens, sampling=greedy)))
    return scheduler


def step(runner: Runner, scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    scheduler.commit(plan, runner.run(plan))


def read_bandwidth() -> float:
    """Bytes per second that all threads together read from memory: the median of five sums over 1 GiB."""
    data = torch.ones(1 << 27, dtype=torch.float64)
    return median(data.nbytes / seconds(data.sum) for _ in range(5))


def matmul_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product: the median of five."""
    a, b = torch.randn(1024, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    return median(2 * 1024 * 2048 * 2048 / seconds(lambda: a @ b) for _ in range(5))


def seconds(work: object) -> float:
    begin = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - begin


main()
