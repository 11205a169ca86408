"""What `helexa.batch` makes of the engine: a thousand short prompts, beside the engine alone on the same tokens.

usage: python benchmarks/batch.py [MODEL] [--prompts 1000] [--width 32] [--tokens 32] [--only library|engine]

Both run in processes of their own, one after the other. Each answer has exactly `--tokens` tokens, drawn greedily, and
no two prompts are alike beyond what the chat template begins with. The engine alone is what `benchmarks/engine.py`
measures (scheduler, runner and sampler in one process, speculation off), here with a new prompt for each that has ended,
so that its rate has the reading of prompts in it; the library's clock starts when the model is loaded.

JSON lines: `tok_s` counts generated tokens of all prompts; `cpu_s` is processor time of this process and of the engine's
while they ran; `held_mb` is what this process holds after a tenth of the prompts and in the end.
"""

import argparse
import json
import os
import subprocess
import sys
import time

WORDS = (
    "river stone window garden letter mirror engine forest candle bridge harbour winter pencil violin market".split()
)


def prompts(count: int) -> list[str]:
    """Short questions, each another one."""
    return [f"Write a line about the {WORDS[n % 15]} and the {WORDS[n // 15 % 15]}, number {n}." for n in range(count)]


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
        before = _cpu(me)
        begin = time.perf_counter()
        results = loaded.batch(
            prompts(count), max_parallel=width, max_tokens=tokens, temperature=0, on_result=on_result
        )
        seconds = time.perf_counter() - begin
        cpu = _cpu(me)
    generated = sum(result.usage.completion for result in results)
    spent = {name: round(cpu[name] - before[name], 2) for name in cpu}
    _say(
        "library",
        generated,
        seconds,
        prompt_tokens=sum(result.usage.prompt for result in results),
        cpu_s=spent,
        held_mb=held,
    )


def engine(model: str, count: int, width: int, tokens: int) -> None:
    from helexa.neuron.engine.threads import ENVIRONMENT

    os.environ.update(ENVIRONMENT | os.environ)
    import psutil
    from local_model import local_path

    from helexa.neuron.engine.messages import EngineOptions, Generate, SamplingParams
    from helexa.neuron.engine.pages import PagePool
    from helexa.neuron.engine.runner import PAGE_SIZE, Runner
    from helexa.neuron.engine.scheduler import Scheduler
    from helexa.neuron.engine.sequence import Sequence
    from helexa.neuron.text.model_text import ModelText

    path, options = local_path(model), EngineOptions(speculation=False)
    runner, text = Runner(path, options), ModelText.open(path)
    ids = [text.prompt_ids([{"role": "user", "content": prompt}]) for prompt in prompts(count)]
    stops = sorted(text.tokenizer.eos_ids)
    scheduler = Scheduler(options, PagePool(runner.facts.kv_pages, PAGE_SIZE))
    me = psutil.Process()
    before, begin = _cpu(me), time.perf_counter()
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
        plan = scheduler.plan()
        for output in scheduler.commit(plan, runner.run(plan).tokens):
            generated += len(output.tokens)
            running -= output.finish is not None
    seconds, cpu = time.perf_counter() - begin, _cpu(me)
    spent = {"engine": round(cpu["library"] - before["library"], 2)}
    _say("engine", generated, seconds, prompt_tokens=sum(map(len, ids)), cpu_s=spent)


def _cpu(process: object) -> dict[str, float]:
    """Seconds of processor time of the process, and of its children."""
    own = process.cpu_times()  # type: ignore[attr-defined]
    spent = {"library": own.user + own.system}
    children = [child.cpu_times() for child in process.children(recursive=True)]  # type: ignore[attr-defined]
    if children:
        spent["engine"] = sum(child.user + child.system for child in children)
    return spent


def _say(what: str, tokens: int, seconds: float, **more: object) -> None:
    line = {"what": what, "tok_s": round(tokens / seconds, 1), "tokens": tokens, "seconds": round(seconds, 2)}
    print(json.dumps(line | more), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="helexa/small")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--only", choices=("library", "engine"))
    asked = parser.parse_args()
    if asked.only:
        globals()[asked.only](asked.model, asked.prompts, asked.width, asked.tokens)
        return
    for what in ("engine", "library", "engine", "library"):
        subprocess.run([sys.executable, *sys.argv, "--only", what], check=True)


if __name__ == "__main__":
    main()
