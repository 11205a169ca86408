"""Compare a model's logits at every position of a text with logits in float32, for helexa and for llama.cpp.

usage: python perf/fidelity.py MODEL [--activations auto,int16,int8] [--kv-dtypes auto] [--tokens 600]
           [--text README.md] [--llama-cpp PYTHON] [--ik-llama-cpp PYTHON]

MODEL is a path to a GGUF file or a Hugging Face folder, or any model id that a node accepts (`helexa/small`). The
reference is helexa in float32 with plain torch, with the same quantized weights. PYTHON is a Python interpreter that
has llama-cpp-python or ik-llama-cpp-python; these engines need a GGUF file. The script prints a JSON line for each
engine and setting:

    kl_mean, kl_p99     Kullback-Leibler divergence of the predicted distribution from the reference, in nats: the mean
                        over all positions, and the 99th percentile
    top1                fraction of positions at which the most probable token equals that of the reference
    perplexity          perplexity of the text
"""

import argparse
import json
import os
import subprocess
import tempfile
from itertools import product
from pathlib import Path

from helexa.neuron.engine.ipc import ENVIRONMENT

os.environ.update(ENVIRONMENT | os.environ)  # same environment as an engine process

import msgspec
import numpy as np
import torch
from support.local_model import local_path
from torch import Tensor

from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.kv_cache_and_prefix_hashes import PagePool, StatePool
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import int32
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.text.model_text import ModelText

FOLDER = Path(__file__).parent


def logits_of(model: Path, options: EngineOptions, tokens: list[int]) -> Tensor:
    """Return helexa's logits after each of the tokens, float32 [T, vocabulary]."""
    runner = load_once(model, options)
    facts = runner.facts
    states = StatePool(1, facts.snapshots) if facts.state_bytes else None
    scheduler = Scheduler(options, PagePool(facts.kv_pages, PAGE_SIZE), states)
    request = Generate(id=0, prompt=tokens, max_tokens=1, sampling=SamplingParams(temperature=0))
    if (rejection := scheduler.add(Sequence(request))) is not None:
        raise SystemExit(rejection.error)
    rows: list[Tensor] = []
    while not scheduler.idle:
        plan = scheduler.plan()
        step = build_step(plan)
        every_row = msgspec.structs.replace(step, sample_rows=int32(range(len(step.tokens))), sampling=None)
        logits = runner.logits_of(every_row).float().clone()
        rows.append(logits)
        scheduler.commit(plan, [int(logits[-1].argmax())] if any(entry.samples for entry in plan) else [])
    return torch.cat(rows)


def logits_of_peer(script: str, python: str, model: Path, tokens: list[int]) -> Tensor:
    """Return a peer's logits after each of the tokens, float32 [T, vocabulary]."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        command = [python, str(FOLDER / "peers" / script), str(model), str(out)]
        subprocess.run(command, input=json.dumps(tokens), text=True, check=True, stderr=subprocess.DEVNULL)
        return torch.from_numpy(np.load(out))


def report(engine: str, logits: Tensor, reference: Tensor, tokens: list[int]) -> None:
    """Print the line that compares an engine's logits [T, vocabulary] with the reference."""
    vocabulary = min(logits.shape[1], reference.shape[1])
    ours, exact = logits[:, :vocabulary].log_softmax(-1).double(), reference[:, :vocabulary].log_softmax(-1).double()
    divergence = (exact.exp() * (exact - ours)).sum(-1)
    likelihood = ours[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    figures = {
        "kl_mean": float(divergence.mean()),
        "kl_p99": float(divergence.quantile(0.99)),
        "top1": float((ours.argmax(-1) == exact.argmax(-1)).double().mean()),
        "perplexity": float((-likelihood.mean()).exp()),
    }
    rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
    print(json.dumps({"engine": engine, **rounded}), flush=True)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("model")
    command.add_argument("--activations", default="auto,int16,int8")
    command.add_argument("--kv-dtypes", default="auto")
    command.add_argument("--tokens", type=int, default=600)
    command.add_argument("--text", type=Path, default=FOLDER.parent / "README.md")
    command.add_argument("--llama-cpp", metavar="PYTHON")
    command.add_argument("--ik-llama-cpp", metavar="PYTHON")
    arguments = command.parse_args()
    model = local_path(arguments.model)
    tokens = ModelText.open(model).tokenizer.encode(arguments.text.read_text())[: arguments.tokens]
    reference = logits_of(model, EngineOptions(dtype="float32", speculation=False), tokens)
    report("float32", reference, reference, tokens)
    for activations, kv_dtype in product(arguments.activations.split(","), arguments.kv_dtypes.split(",")):
        options = msgspec.convert(
            {"activations": activations, "kv_dtype": kv_dtype, "speculation": False}, EngineOptions
        )
        report(f"helexa {activations}, KV {kv_dtype}", logits_of(model, options, tokens), reference, tokens)
    for name, script, python in (
        ("llama.cpp", "logits_llama_cpp.py", arguments.llama_cpp),
        ("ik_llama.cpp", "logits_llama_cpp.py", arguments.ik_llama_cpp),
    ):
        if python:
            report(name, logits_of_peer(script, python, model, tokens), reference, tokens)


if __name__ == "__main__":
    main()
