"""Measure how much speculation (draft tokens) speeds up repetitive output, and its cost for other output.

usage: python perf/speculation.py [MODEL] [--threads 2] [--rounds 5]

Two engines run the same model, one with speculation and one without. They answer the same prompts in alternating order,
and the idle engine sleeps while the other engine computes. Tokens per second count from the first token on. Each round
has three tasks:

    edit            the model copies `support/sample.txt` (about 400 tokens) greedily, after a prompt that has the file
                    twice. `copied` is the share of the file that the answer repeats before the first difference. If it
                    is less than 0.9, the benchmark ends.
    free            the model tells a story in 256 tokens, greedily
    free, sampled   the same at temperature 0.8, because greedy stories of a small model repeat after some time

The script prints JSON lines: one per task and engine with the tokens per second (median and all rounds), then the
verdicts, which are the medians of the ratios of the two engines in each round.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from support.output import print_line, print_verdict, run
from support.scenario import GREEDY, TimedAnswer, ask, engine, parser

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import SamplingParams
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.text.model_text import ModelText

STORY_TOKENS = 256
COPIED = 0.9
EDIT_THRESHOLD, FREE_THRESHOLD = 1.5, 0.98
SUBJECTS = ("a lighthouse", "two sisters", "the last train", "a lost letter", "an old clock", "the night market")


@dataclass(frozen=True)
class Task:
    """A request that both engines answer in one round."""

    name: str
    prompt: list[int]
    tokens: int
    sampling: SamplingParams


class Tasks:
    """Creates the three requests of each round (see the module) for one model."""

    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._file = (Path(__file__).with_name("support") / "sample.txt").read_text()
        self._file_tokens = len(text.tokenizer.encode(self._file))

    def round_tasks(self, number: int) -> list[Task]:
        """Return the requests of round `number`: `edit`, `free` and `free, sampled`."""
        shown = f"```python\n{self._file}```\n\n"
        edit = self._text.tokenizer.encode(
            f"File {number}:\n\n{shown}The same file, word for word:\n\n{shown}Once more, word for word:\n\n```python\n"
        )
        subject = SUBJECTS[number % len(SUBJECTS)]
        ask_for = f"Tell me story number {number}, a long one, about {subject}."
        story = self._text.prompt_ids([{"role": "user", "content": ask_for}])
        return [
            Task("edit", edit, self._file_tokens, GREEDY),
            Task("free", story, STORY_TOKENS, GREEDY),
            Task("free, sampled", story, STORY_TOKENS, SamplingParams(temperature=0.8, seed=number)),
        ]

    def copied(self, answer: TimedAnswer) -> float:
        """Return the share of `sample.txt` that the output repeats before the first difference, from 0 to 1."""
        written = self._text.tokenizer.decode(answer.tokens)
        pairs = enumerate(zip(written, self._file, strict=False))
        return next((i for i, (ours, theirs) in pairs if ours != theirs), len(written)) / len(self._file)


@asynccontextmanager
async def two_engines(model: Path, threads: int) -> AsyncIterator[dict[str, EngineClient]]:
    """Run an engine with speculation (`on`) and an engine without (`off`) during the `with` block."""
    async with (
        engine(model, EngineOptions(threads=threads, speculation=True)) as on,
        engine(model, EngineOptions(threads=threads, speculation=False)) as off,
    ):
        yield {"on": on, "off": off}


async def measure(model: Path, threads: int, rounds: int) -> None:
    """Run all rounds on both engines, then print the results."""
    tasks = Tasks(ModelText.open(model))
    rates: dict[str, dict[str, list[float]]] = {}
    copied: list[float] = []
    async with two_engines(model, threads) as clients:
        for number in range(rounds + 1):  # the first round is a warm-up
            for task in tasks.round_tasks(number):
                for variant in list(clients)[:: 1 if number % 2 else -1]:
                    answer = await ask(clients[variant], task.prompt, task.tokens, task.sampling)
                    if task.name == "edit":
                        copied.append(tasks.copied(answer))
                    if number:
                        task_rates = rates.setdefault(task.name, {"on": [], "off": []})
                        task_rates[variant].append(answer.tok_s)
    for name, task_rates in rates.items():
        for variant, runs in task_rates.items():
            print_line(row=name, speculation=variant, tok_s=median(runs), runs=runs)
    print_line(row="edit", copied=min(copied))
    if min(copied) < COPIED:
        raise SystemExit("the model does not repeat the file, so the figures are meaningless; use another model")
    for name, threshold in (("edit", EDIT_THRESHOLD), ("free", FREE_THRESHOLD), ("free, sampled", FREE_THRESHOLD)):
        ratio = median(on / off for on, off in zip(rates[name]["on"], rates[name]["off"], strict=True))
        print_verdict(f"{name}, on / off", ratio, f">= {threshold}", ratio >= threshold)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    run(measure(arguments.model, arguments.threads, arguments.rounds))


if __name__ == "__main__":
    main()
