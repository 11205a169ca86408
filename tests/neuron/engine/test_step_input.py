"""Steps as plain data: recorded in one process, computed in another, with the same bits."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from driving import scheduler_of
from msgspec.structs import replace

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder import build_step
from helexa.neuron.engine.ipc.messages import Embed, EngineOptions, Generate, SamplingParams
from helexa.neuron.engine.loading.load import load
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step.step_input import StepInput, decode_input, encode, int32
from helexa.neuron.engine.step.step_output import StepOutput, decode_output
from tiny_models import tiny_model

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HYBRID = {
    "num_attention_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
# Whatever a request can ask for that reaches a step.
WAYS = [
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=-3),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.01, seed=2**63, repetition_penalty=1.3),
    SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={7: 2.5, 400: -1.0}),
]
REPLAY = """
import sys
from pathlib import Path
from helexa.neuron.engine.loading.load import load
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.step.step_input import decode_input, encode
import msgspec, torch

runner = load(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=EngineOptions))
compute = runner.compute
def keep(step, last=None):
    global logits
    logits, hidden = compute(step, last)
    logits = logits.clone()
    return logits.clone(), hidden
runner.compute = keep
for line in sys.stdin:
    output = runner.run(decode_input(bytes.fromhex(line)))
    print(logits.float().numpy().tobytes().hex(), encode(output).hex(), flush=True)
"""


@pytest.fixture(scope="module", params=["llama", "qwen3_5_text"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    shape = SHAPE | (HYBRID if "qwen" in request.param else {})
    tiny_model(folder, model_type=request.param, vocab_size=512, **shape)
    return folder


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_recorded_step_gives_the_same_bits_in_another_process(model: Path, kernels: str) -> None:
    """Chunks of prompts, decoding, drafts, penalties, log-probabilities, vectors, and snapshots of state."""
    options = EngineOptions(dtype="auto", kernels=kernels, kv_cache_mb=8, snapshot_mb=8, max_sequences=8, threads=1)  # type: ignore[arg-type]
    runner = load(model, options)
    recorded, expected = record(runner)
    assert {"drafts", "sum", "scores", "sampling"} <= {feature for step in recorded for feature in features(step)}
    if runner.facts.state_bytes:
        assert any(len(step.saves) for step in recorded)
        assert any(len(step.restores) for step in recorded)
    command = [sys.executable, "-c", REPLAY, str(model), msgspec.json.encode(options).decode()]
    lines = "".join(f"{encode(step).hex()}\n" for step in recorded)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, timeout=300)
    found = [line.split(" ") for line in done.stdout.splitlines()]
    assert len(found) == len(expected)
    for (logits, output), (wanted_logits, wanted) in zip(found, expected, strict=True):
        assert bytes.fromhex(logits) == wanted_logits
        told = decode_output(bytes.fromhex(output))
        assert (told.tokens, told.logprobs, told.scores) == (wanted.tokens, wanted.logprobs, wanted.scores)
        assert {number: part.tobytes() for number, part in told.hidden.items()} == {
            number: part.tobytes() for number, part in wanted.hidden.items()
        }


def record(runner: Runner) -> tuple[list[StepInput], list[tuple[bytes, StepOutput]]]:
    """Steps of requests that differ in all that a step knows of them, their logits and what they brought."""
    scheduler = scheduler_of(runner, max_sequences=8, max_step_tokens=70)
    loop = [11, 12, 13, 14, 15, 16] * 12
    for number, sampling in enumerate(WAYS):
        prompt = loop if number == 0 else [(37 * number + 7 * place) % 512 for place in range(40 * number)]
        scheduler.add(Sequence(Generate(id=number, prompt=prompt, max_tokens=12, sampling=sampling)))
    greedy = SamplingParams(temperature=0)
    scored = Generate(id=10, prompt=loop[:50], max_tokens=2, sampling=greedy, prompt_logprobs=3)
    scheduler.add(Sequence(scored))
    repeating = SamplingParams(temperature=0, logit_bias={9: 1000.0})  # which is guessed right
    scheduler.add(Sequence(Generate(id=12, prompt=[1, 2, 3], max_tokens=40, sampling=repeating)))
    scheduler.add(Sequence.to_embed(Embed(id=11, prompt=loop[:30], pooling="mean")))
    steps: list[StepInput] = []
    results: list[tuple[bytes, StepOutput]] = []
    compute = runner.compute
    logits = torch.empty(0)

    def keep(step: StepInput, last: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        nonlocal logits
        found, hidden = compute(step, last)
        logits = found.clone()
        return found, hidden

    runner.compute = keep  # type: ignore[method-assign]
    added = False
    while not scheduler.idle or not added:
        if not added and len(scheduler.running) < 3:
            added = True  # a prompt that begins as one before it, whose state was kept
            scheduler.add(Sequence(Generate(id=20, prompt=[*loop, 5], max_tokens=3, sampling=greedy)))
        plan = scheduler.plan()
        steps.append(build_step(plan))
        output = runner.run(steps[-1])
        results.append((logits.float().numpy().tobytes(), output))
        scheduler.commit(plan, output.tokens, None, output.logprobs, output.hidden, output.scores)
    return steps, results


def features(step: StepInput) -> set[str]:
    found = {"sum" if rows.followers is None else "scores" for rows in step.hidden}
    if step.sampling is not None:
        found.add("sampling")
        lengths = [stop - start for start, stop in pairwise(step.starts)]
        found |= {"drafts" for length, own in zip(lengths, step.settled, strict=True) if length > own}
    return found


def test_what_is_no_step_is_refused() -> None:
    step = build_step([PlanEntry(Sequence(Generate(id=1, prompt=[5], max_tokens=1, sampling=WAYS[1]), pages=[0]), 1)])
    assert decode_input(encode(step)).sampling is not None
    whole = msgspec.msgpack.decode(encode(step))
    for broken in (
        {**whole, "tokens": ["|O", [1], b"12345678"]},
        {**whole, "tokens": ["<i4", [3], b"1234"]},
        {**whole, "bucket": 7},
        {key: value for key, value in whole.items() if key != "slots"},
    ):
        with pytest.raises(msgspec.ValidationError):
            decode_input(msgspec.msgpack.encode(broken))


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_embeddings_take_the_place_of_those_of_tokens(model: Path, kernels: str) -> None:
    runner = load(model, EngineOptions(kernels=kernels, kv_cache_mb=4, max_sequences=2))  # type: ignore[arg-type]
    tokens = [3, 9, 27, 81, 243]
    step = one_prompt(tokens)
    expected = runner.forward(step).clone()
    rows = int32([1, 3])
    own = runner._model.embed(torch.tensor([9, 81], dtype=torch.int32)).float().numpy().copy()
    blind = one_prompt([3, 0, 27, 0, 243])
    assert not torch.equal(runner.forward(blind), expected)
    injected = replace(blind, embeddings=own, embedding_rows=rows)
    assert torch.equal(runner.forward(decode_input(encode(injected))), expected)
    assert torch.equal(runner.forward(step), expected), "nothing of it is left"


def one_prompt(tokens: list[int]) -> StepInput:
    request = Generate(id=1, prompt=tokens, max_tokens=1, sampling=SamplingParams())
    return build_step([PlanEntry(Sequence(request, pages=[0], slot=0), len(tokens))])


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_positions_of_three_axes_that_agree_are_positions(model: Path, kernels: str) -> None:
    runner = load(model, EngineOptions(kernels=kernels, kv_cache_mb=4, max_sequences=2))  # type: ignore[arg-type]
    step = one_prompt([3, 9, 27, 81, 243])
    expected = runner.forward(step).clone()
    threefold = replace(step, positions=np.stack([step.positions] * 3))
    torch.testing.assert_close(runner.forward(threefold), expected, rtol=1e-4, atol=1e-4)
