"""Compare a model's greedy tokens with those of another engine (the oracle) for the same prompt token ids.

usage: python perf/agreement.py MODEL [--oracle PYTHON] [--plain] [--dtypes auto,float32] [--threads N]

MODEL is a GGUF file or a Hugging Face folder. For a GGUF file, the oracle is llama.cpp, and PYTHON is a Python
interpreter that has xllamacpp. For a folder, the oracle is transformers in float32. llama.cpp rounds activations to 8
bits in products with quantized weights, which changes the logprobs of small models by some tenths. With `--plain`,
llama.cpp reads a copy of the file with float32 weights and does not round activations.

The script generates 32 tokens after each of five prompts, or fewer if the oracle ends its text. The last prompt is
long. For each dtype and prompt, a JSON line reports whether all tokens are equal. If they differ, the line contains:

    at          position of the first difference
    ours        helexa's token at this position
    best        the oracle's two best tokens at this position
    gap         difference of the two best tokens' logprobs in the oracle
    our_gap     the same difference in helexa; negative if helexa prefers the second token

The exit status is 1 if tokens differ and `gap` is larger than 0.05. A smaller gap is a near tie.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from helexa.neuron.engine.ipc import ENVIRONMENT

os.environ.update(ENVIRONMENT | os.environ)  # same environment as an engine process

import torch
from support.plain_gguf import plain_copy
from torch import Tensor

from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.ops.kernel_header import PAGE_SIZE

FOLDER = Path(__file__).parent
STEPS = 32
NEAR_TIE = 0.05
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n: int) -> int:\n    ",
    "Die drei häufigsten Gründe, warum Züge zu spät kommen, sind",
    (FOLDER / "support/sample.txt").read_text() * 2,
]


def oracle_lines(model: Path, python: str) -> list[dict[str, Any]]:
    """Run the oracle (the other engine) in another process, and return its output line for each prompt."""
    script = "oracle_transformers.py" if model.is_dir() else "oracle_llama_cpp.py"
    command = [python, str(FOLDER / "peers" / script), str(model), str(STEPS)]
    done = subprocess.run(command, input=json.dumps(PROMPTS), stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"prompt"')]


def plain_oracle_lines(model: Path, python: str) -> list[dict[str, Any]]:
    """Run the oracle on a copy of the GGUF file `model` with float32 weights. Return its line for each prompt."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "plain.gguf"
        plain_copy(model, copy)
        return oracle_lines(copy, python)


class Engine:
    """helexa's engine in this process. It runs one prompt at a time."""

    def __init__(self, model: Path, options: EngineOptions) -> None:
        self._options = options
        self._runner = load_once(model, options)
        self.kernels = self._runner.ops.name

    def follow(self, prompt: list[int]) -> tuple[list[int], Tensor]:
        """Generate `STEPS` tokens greedily after the token ids `prompt`.

        Returns:
            The generated tokens, and the logprobs of all tokens at each step with shape [STEPS, vocabulary].
        """
        facts = self._runner.facts
        states = StatePool(1, facts.snapshots) if facts.state_bytes else None
        scheduler = Scheduler(self._options, PagePool(facts.kv_pages, PAGE_SIZE), states)
        request = Generate(id=0, prompt=prompt, max_tokens=STEPS, sampling=SamplingParams(temperature=0))
        if (rejection := scheduler.add(Sequence(request))) is not None:
            raise SystemExit(rejection.error)
        tokens: list[int] = []
        rows: list[Tensor] = []
        while not scheduler.idle:
            plan = scheduler.plan()
            logits = self._runner.logits_of(build_step(plan)).float()
            rows += logits.log_softmax(-1)
            for output in scheduler.commit(plan, logits.argmax(-1).tolist()):
                tokens += output.tokens
        return tokens, torch.stack(rows)


def compare(line: dict[str, Any], tokens: list[int], logprobs: Tensor) -> dict[str, Any]:
    """Return the output line that compares helexa's tokens after a prompt with the tokens of the oracle.

    Args:
        line: the oracle's output line for the prompt (see `oracle_llama_cpp.py`).
        tokens: helexa's tokens.
        logprobs: helexa's logprobs with shape [STEPS, vocabulary].
    """
    pairs = list(zip(line["tokens"], tokens, strict=False))
    at = next((place for place, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
    if at is None:
        return {"equal": True, "tokens": len(pairs)}
    first, second = line["best"][at]
    return {
        "equal": False,
        "at": at,
        "ours": tokens[at],
        "best": line["best"][at],
        "gap": round(line["gap"][at], 4),
        "our_gap": round(float(logprobs[at, first] - logprobs[at, second]), 4),
    }


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("model", type=Path)
    command.add_argument("--oracle", default=sys.executable, help="an interpreter that has the oracle's package")
    command.add_argument("--plain", action="store_true", help="float32 weights for llama.cpp")
    command.add_argument("--dtypes", default="auto,float32")
    command.add_argument("--threads", type=int, default=0)
    arguments = command.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    lines = (plain_oracle_lines if arguments.plain else oracle_lines)(arguments.model, arguments.oracle)
    worst = 0.0
    for dtype in arguments.dtypes.split(","):
        options = EngineOptions(dtype=dtype, speculation=False, prefix_reuse="off", max_sequences=1)
        engine = Engine(arguments.model, options)
        for number, line in enumerate(lines):
            comparison = compare(line, *engine.follow(line["prompt"]))
            about = {"dtype": dtype, "kernels": engine.kernels, "prompt": number, "length": len(line["prompt"])}
            print(json.dumps(about | comparison), flush=True)
            worst = max(worst, comparison.get("gap", 0.0))
    raise SystemExit(worst > NEAR_TIE)


if __name__ == "__main__":
    main()
