"""Compare the throughput of the library's `helexa.batch` with the engine alone, on the same thousand short prompts.

usage: python perf/batch.py [MODEL] [--prompts 1000] [--width 32] [--tokens 32] [--rounds 2]

The library and the engine alone run one after the other, in separate processes, `--rounds` times. Answers are greedy
and have at most `--tokens` tokens. The prompts share only the beginning of the chat template. At most `--width` prompts
run at a time. The engine alone runs as in `perf/engine.py`: scheduler, runner and sampler in one process, without
speculation. When an answer ends, the next prompt starts, so the rate of the engine alone includes prefill. The time for
loading the model does not count.

Each run prints a JSON line with these keys:

    tok_s       generated tokens of all prompts per second
    cpu_s       CPU seconds of the process of the library (`library`) and of the engine process (`engine`)
    held_mb     resident MiB of the library's process after a tenth of the prompts, and at the end

The last line has `ratio`, the library's best rate divided by the best rate of the engine alone. It must be at least
0.9.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

WORDS = ("river", "stone", "window", "garden", "letter", "mirror", "engine", "forest", "candle", "bridge", "harbour")
THRESHOLD = 0.9


def prompts(count: int) -> list[str]:
    """Return `count` short questions that are all different."""
    size = len(WORDS)
    return [
        f"Write a line about a {WORDS[n % size]} and a {WORDS[n // size % size]}, number {n}." for n in range(count)
    ]


def library(model: str, count: int, width: int, tokens: int) -> None:
    import psutil

    import helexa

    me = psutil.Process()
    held: list[float] = []

    def on_result(index: int, result: object) -> None:
        done.append(index)
        if len(done) in (max(count // 10, 1), count):
            held.append(round(me.memory_info().rss / 2**20, 1))

    done: list[int] = []
    with helexa.load(model, target="private") as loaded:
        loaded.batch(prompts(width), max_parallel=width, max_tokens=2, temperature=0)  # warm up
        cpu_before = _cpu(me)
        begin = time.perf_counter()
        results = loaded.batch(
            prompts(count), max_parallel=width, max_tokens=tokens, temperature=0, on_result=on_result
        )
        seconds = time.perf_counter() - begin
        cpu = _cpu(me)
    generated = sum(result.usage.completion for result in results)
    spent = {name: round(cpu[name] - cpu_before[name], 2) for name in cpu}
    _say(
        "library",
        generated,
        seconds,
        prompt_tokens=sum(result.usage.prompt for result in results),
        cpu_s=spent,
        held_mb=held,
    )


def engine(model: str, count: int, width: int, tokens: int) -> None:
    from helexa.neuron.engine.ipc import ENVIRONMENT

    os.environ.update(ENVIRONMENT | os.environ)
    import psutil
    from support.local_model import local_path

    from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
    from helexa.neuron.engine.ipc.engine_options import EngineOptions
    from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
    from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool
    from helexa.neuron.engine.loading.backend_kernels_and_kv_dtype import choose_backend
    from helexa.neuron.engine.loading.load import load_once
    from helexa.neuron.engine.scheduling.scheduler import Scheduler
    from helexa.neuron.engine.scheduling.sequence import Sequence
    from helexa.neuron.ops.kernel_header import PAGE_SIZE
    from helexa.neuron.text.model_text import ModelText

    path, options = local_path(model), EngineOptions(speculation=False)
    choose_backend(options)
    runner, text = load_once(path, options), ModelText.open(path)
    ids = [text.prompt_ids([{"role": "user", "content": prompt}]) for prompt in prompts(count)]
    stops = sorted(text.tokenizer.eos_ids)
    scheduler = Scheduler(options, PagePool(runner.facts.kv_pages, PAGE_SIZE))
    me = psutil.Process()
    cpu_before, begin = _cpu(me), time.perf_counter()
    waiting, running, generated = enumerate(ids), 0, 0
    while True:
        while running < width and (item := next(waiting, None)) is not None:
            number, prompt = item
            request = Generate(
                id=number, prompt=prompt, max_tokens=tokens, sampling=SamplingParams(temperature=0), stop_ids=stops
            )
            assert scheduler.add(Sequence(request)) is None
            running += 1
        if not running:
            break
        plan, started = scheduler.plan(), time.perf_counter()
        sampled = runner.launch(build_step(plan)).read().tokens
        for output in scheduler.commit(plan, sampled, time.perf_counter() - started):
            generated += len(output.tokens)
            running -= output.finish is not None
    seconds, cpu = time.perf_counter() - begin, _cpu(me)
    spent = {"engine": round(cpu["library"] - cpu_before["library"], 2)}
    _say("engine", generated, seconds, prompt_tokens=sum(map(len, ids)), cpu_s=spent)


def _cpu(process: "psutil.Process") -> dict[str, float]:
    """Return the CPU seconds of a process (`library`) and of all its child processes together (`engine`)."""
    own_cpu = process.cpu_times()
    spent = {"library": own_cpu.user + own_cpu.system}
    children = [child.cpu_times() for child in process.children(recursive=True)]
    if children:
        spent["engine"] = sum(child.user + child.system for child in children)
    return spent


def _say(subject: str, tokens: int, seconds: float, **figures: object) -> None:
    line = {"what": subject, "tok_s": round(tokens / seconds, 1), "tokens": tokens, "seconds": round(seconds, 2)}
    print(json.dumps(line | figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="helexa/small")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=("library", "engine"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        measure = library if arguments.only == "library" else engine
        measure(arguments.model, arguments.prompts, arguments.width, arguments.tokens)
        return
    best = {"engine": 0.0, "library": 0.0}
    for subject in ("engine", "library") * arguments.rounds:
        run = subprocess.run(
            [sys.executable, *sys.argv, "--only", subject], check=True, stdout=subprocess.PIPE, text=True
        )
        print(run.stdout, end="", flush=True)
        best[subject] = max(best[subject], json.loads(run.stdout)["tok_s"])
    ratio = best["library"] / best["engine"]
    print(json.dumps({"ratio": round(ratio, 3), "threshold": THRESHOLD, "held": ratio >= THRESHOLD}))


if __name__ == "__main__":
    main()
