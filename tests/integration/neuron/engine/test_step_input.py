"""Steps as plain data: a step recorded in one process gives the same bits in another process."""

import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from scheduler_runs import scheduler_of

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Embed, Generate, SamplingParams
from helexa.neuron.engine.loading.load import load
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import StepInput, array_of, decode_input, encode, int32
from helexa.neuron.engine.step_output_logprobs_and_pooling import StepOutput
from nightly import daily
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
# Sampling parameters that cover all inputs of a step.
SAMPLING = [
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0.8, top_p=0.9, seed=-3),
    SamplingParams(temperature=1.2, top_k=20, min_p=0.01, seed=2**63, repetition_penalty=1.3),
    SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={7: 2.5, 400: -1.0}),
]
MODELS = ("llama", "qwen3_5_text")
KERNELS = ("torch", "auto")
REPLAY = """
import sys
from pathlib import Path
from helexa.neuron.engine.loading.load import load
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.step_input_and_graph_sizes import decode_input, encode
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
    output = runner.launch(decode_input(bytes.fromhex(line))).read()
    print(logits.float().numpy().tobytes().hex(), encode(output).hex(), flush=True)
"""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    shape = SHAPE | (HYBRID if "qwen" in request.param else {})
    tiny_model(folder, model_type=request.param, vocab_size=512, **shape)
    return folder


@pytest.mark.parametrize(
    ("model", "kernels"),
    daily([("llama", "torch"), ("qwen3_5_text", "auto")], product(MODELS, KERNELS), several=True),
    indirect=["model"],
)
def test_serialized_step_gives_bit_identical_results_in_another_process(model: Path, kernels: str) -> None:
    """Covers chunked prompts, decoding, drafts, penalties, log-probabilities, embeddings and state snapshots."""
    options = EngineOptions(dtype="auto", kernels=kernels, kv_cache_mb=8, snapshot_mb=8, max_sequences=8, threads=1)  # type: ignore[arg-type]
    runner = load(model, options)
    recorded, expected = record(runner)
    assert {"drafts", "sum", "scores", "sampling"} <= {feature for step in recorded for feature in features(step)}
    if runner.facts.state_bytes:
        assert any(len(step.saves) for step in recorded)
        assert any(len(step.restores) for step in recorded)
    command = [sys.executable, "-c", REPLAY, str(model), msgspec.json.encode(options).decode()]
    lines = "".join(f"{encode(step).hex()}\n" for step in recorded)
    process = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, timeout=300)
    results = [line.split(" ") for line in process.stdout.splitlines()]
    assert len(results) == len(expected)
    for (logits, output), (wanted_logits, wanted) in zip(results, expected, strict=True):
        assert bytes.fromhex(logits) == wanted_logits
        actual = msgspec.msgpack.decode(bytes.fromhex(output), type=StepOutput, dec_hook=array_of)
        assert (actual.tokens, actual.logprobs, actual.scores) == (wanted.tokens, wanted.logprobs, wanted.scores)
        assert {number: hidden.tobytes() for number, hidden in actual.hidden.items()} == {
            number: hidden.tobytes() for number, hidden in wanted.hidden.items()
        }


def record(runner: Runner) -> tuple[list[StepInput], list[tuple[bytes, StepOutput]]]:
    """Run requests with all kinds of step inputs; return the steps, and the logits and output of each step."""
    scheduler = scheduler_of(runner, max_sequences=8, max_step_tokens=70)
    loop = [11, 12, 13, 14, 15, 16] * 12
    for number, sampling in enumerate(SAMPLING):
        prompt = loop if number == 0 else [(37 * number + 7 * position) % 512 for position in range(40 * number)]
        scheduler.add(Sequence(Generate(id=number, prompt=prompt, max_tokens=12, sampling=sampling)))
    greedy = SamplingParams(temperature=0)
    scored = Generate(id=10, prompt=loop[:50], max_tokens=2, sampling=greedy, prompt_logprobs=3)
    scheduler.add(Sequence(scored))
    repeating = SamplingParams(temperature=0, logit_bias={9: 1000.0})  # so that its drafts are right
    scheduler.add(Sequence(Generate(id=12, prompt=[1, 2, 3], max_tokens=40, sampling=repeating)))
    scheduler.add(Sequence.to_embed(Embed(id=11, prompt=loop[:30], pooling="mean")))
    steps: list[StepInput] = []
    results: list[tuple[bytes, StepOutput]] = []
    compute = runner.compute
    logits = torch.empty(0)

    def keep(step: StepInput, last: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        nonlocal logits
        computed, hidden = compute(step, last)
        logits = computed.clone()
        return computed, hidden

    runner.compute = keep  # type: ignore[method-assign]
    added = False
    while not scheduler.idle or not added:
        if not added and len(scheduler.running) < 3:
            added = True  # a prompt with a cached prefix, whose state was saved
            scheduler.add(Sequence(Generate(id=20, prompt=[*loop, 5], max_tokens=3, sampling=greedy)))
        plan = scheduler.plan()
        steps.append(build_step(plan))
        output = runner.launch(steps[-1]).read()
        results.append((logits.float().numpy().tobytes(), output))
        scheduler.commit(plan, output.tokens, None, output.logprobs, output.hidden, output.scores)
    return steps, results


def features(step: StepInput) -> set[str]:
    names = {"sum" if rows.followers is None else "scores" for rows in step.hidden}
    if step.sampling is not None:
        names.add("sampling")
        lengths = [stop - start for start, stop in pairwise(step.starts)]
        names |= {"drafts" for length, settled in zip(lengths, step.settled, strict=True) if length > settled}
    return names


def test_serialized_step_that_is_damaged_or_invalid_is_rejected() -> None:
    request = Generate(id=1, prompt=[5], max_tokens=1, sampling=SAMPLING[1])
    step = build_step([PlanEntry(Sequence(request, pages=[0]), 1)])
    assert decode_input(encode(step)).sampling is not None
    valid = msgspec.msgpack.decode(encode(step))
    for broken in (
        {**valid, "tokens": ["|O", [1], b"12345678"]},
        {**valid, "tokens": ["<i4", [3], b"1234"]},
        {**valid, "bucket": 7},
        {key: value for key, value in valid.items() if key != "slots"},
    ):
        with pytest.raises(msgspec.ValidationError):
            decode_input(msgspec.msgpack.encode(broken))


@pytest.mark.parametrize("kernels", KERNELS)
def test_embeddings_passed_in_a_step_replace_the_embeddings_of_its_token_ids(model: Path, kernels: str) -> None:
    runner = load(model, EngineOptions(kernels=kernels, kv_cache_mb=4, max_sequences=2))  # type: ignore[arg-type]
    tokens = [3, 9, 27, 81, 243]
    step = one_prompt(tokens)
    expected = runner.logits_of(step).clone()
    rows = int32([1, 3])
    embeddings = runner._model.embed(torch.tensor([9, 81], dtype=torch.int32)).float().numpy().copy()
    masked = one_prompt([3, 0, 27, 0, 243])
    assert not torch.equal(runner.logits_of(masked), expected)
    injected = replace(masked, embeddings=embeddings, embedding_rows=rows)
    assert torch.equal(runner.logits_of(decode_input(encode(injected))), expected)
    assert torch.equal(runner.logits_of(step), expected), "later steps are not affected"


def one_prompt(tokens: list[int]) -> StepInput:
    request = Generate(id=1, prompt=tokens, max_tokens=1, sampling=SamplingParams())
    return build_step([PlanEntry(Sequence(request, pages=[0], slot=0), len(tokens))])


@pytest.mark.parametrize("kernels", KERNELS)
def test_equal_positions_on_three_rope_axes_give_the_logits_of_one_axis(model: Path, kernels: str) -> None:
    runner = load(model, EngineOptions(kernels=kernels, kv_cache_mb=4, max_sequences=2))  # type: ignore[arg-type]
    step = one_prompt([3, 9, 27, 81, 243])
    expected = runner.logits_of(step).clone()
    threefold = replace(step, positions=np.stack([step.positions] * 3))
    torch.testing.assert_close(runner.logits_of(threefold), expected, rtol=1e-4, atol=1e-4)
