"""Embedding vectors compared with hidden states of transformers, on random weights in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scheduler_runs import GREEDY, scheduler_of
from transformers import AutoModel, PreTrainedModel

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Embed, Generate, Pooling, TokenOutput
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from tiny_models import LENGTHS, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
MODELS = {
    "llama": {"intermediate_size": 128, "num_hidden_layers": 2},
    "gemma3_text": {"intermediate_size": 128, "num_hidden_layers": 2, "sliding_window": 32},
    "qwen3_5_text": {
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
PROMPTS = [[(31 * i + 7 * length) % 311 for i in range(length)] for length in LENGTHS]
POOLINGS: list[Pooling] = ["mean", "last", "cls", "max", "weightedmean"]


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Runner]:
    folder: Path = tmp_path_factory.mktemp("model")
    reference = tiny_model(folder, model_type=request.param, **SHAPE | MODELS[request.param])
    options = EngineOptions(dtype="float32", kv_cache_mb=16, max_sequences=8, snapshot_mb=8, max_step_tokens=1024)
    return reference, load_once(folder, options)


def drive(runner: Runner, scheduler: Scheduler, sequences: list[Sequence]) -> dict[int, list[TokenOutput]]:
    outputs: dict[int, list[TokenOutput]] = {}
    for sequence in sequences:
        outputs[sequence.id] = [rejection] if (rejection := scheduler.add(sequence)) else []
    while not scheduler.idle:
        plan = scheduler.plan()
        outcome = runner.launch(build_step(plan)).read()
        for output in scheduler.commit(plan, outcome.tokens, None, outcome.logprobs, outcome.hidden):
            outputs[output.id].append(output)
    scheduler.check_idle()
    return outputs


def expected(reference: PreTrainedModel, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    with torch.inference_mode():
        hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0]
    weights = torch.arange(1, len(prompt) + 1)[:, None]
    return {
        "mean": hidden.mean(0),
        "last": hidden[-1],
        "cls": hidden[0],
        "max": hidden.amax(0),
        "weightedmean": (hidden * weights).sum(0) / weights.sum(),
    }[pooling]


def assert_right(reference: PreTrainedModel, sequence: Sequence, pooling: Pooling, outputs: list[TokenOutput]) -> None:
    (output,) = outputs
    assert (output.finish, output.tokens, output.error) == ("stop", [], None)
    vector = torch.tensor(output.vector)
    torch.testing.assert_close(vector, expected(reference, sequence.request.prompt, pooling), rtol=0, atol=2e-4)


@pytest.mark.parametrize("chunk", [1024, 48])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_computed_in_chunks_and_batches_match_transformers(
    case: tuple[PreTrainedModel, Runner], pooling: Pooling, chunk: int
) -> None:
    reference, runner = case
    scheduler = scheduler_of(runner, max_step_tokens=chunk, max_sequences=8)
    for _ in range(2):  # the second pass must not reuse the first pass's cache
        sequences = [
            Sequence.to_embed(Embed(id=number, prompt=prompt, pooling=pooling)) for number, prompt in enumerate(PROMPTS)
        ]
        for number, outputs in drive(runner, scheduler, sequences).items():
            assert_right(reference, sequences[number], pooling, outputs)


@pytest.mark.parametrize(("model_type", "names"), [("qwen3", "model."), ("llama", ""), ("lfm2", "")])
def test_embedding_model_without_an_output_head_loads_and_matches_transformers(
    tmp_path: Path, model_type: str, names: str
) -> None:
    """Qwen3-Embedding and Qwen3-VL-Embedding: without an output head, and without the prefix of tensor names."""
    shape = SHAPE | {"intermediate_size": 128, "num_hidden_layers": 2, "tie_word_embeddings": False}
    if model_type == "lfm2":
        shape |= {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    reference = tiny_model(tmp_path, auto=AutoModel, model_type=model_type, **shape)
    for file in tmp_path.glob("model*.safetensors*"):
        file.unlink()
    state = {f"{names}{name}": tensor.contiguous() for name, tensor in reference.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "modules.json").write_text("[]")
    runner = load_once(tmp_path, EngineOptions(dtype="float32", kv_cache_mb=16, max_sequences=8, snapshot_mb=8))
    sequence = Sequence.to_embed(Embed(id=0, prompt=PROMPTS[4], pooling="last"))
    (output,) = drive(runner, scheduler_of(runner, max_sequences=8), [sequence])[0]
    with torch.inference_mode():
        vector = reference(torch.tensor([PROMPTS[4]])).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.tensor(output.vector), vector, rtol=0, atol=2e-4)


@pytest.mark.parametrize("pages", [0, 8])
def test_generated_tokens_are_unchanged_if_embeddings_run_in_the_same_batch(
    case: tuple[PreTrainedModel, Runner], pages: int
) -> None:
    reference, runner = case

    def generations() -> list[Sequence]:
        return [
            Sequence(Generate(id=100 + number, prompt=prompt, max_tokens=70, sampling=GREEDY))
            for number, prompt in enumerate(PROMPTS[:4])
        ]

    def tokens(outputs: dict[int, list[TokenOutput]], number: int) -> list[int]:
        return [token for output in outputs[number] for token in output.tokens]

    separately = drive(runner, scheduler_of(runner, max_sequences=8), generations())
    vectors = [
        Sequence.to_embed(Embed(id=number, prompt=prompt, pooling=POOLINGS[number % len(POOLINGS)]))
        for number, prompt in enumerate(PROMPTS)
    ]
    mixed = [sequence for pair in zip(vectors, generations(), strict=False) for sequence in pair] + vectors[4:]
    together = drive(runner, scheduler_of(runner, pages, max_step_tokens=64, max_sequences=8, speculation=False), mixed)
    for sequence in vectors:
        assert_right(reference, sequence, POOLINGS[sequence.id % len(POOLINGS)], together[sequence.id])
    for number in range(100, 104):
        assert tokens(together, number) == tokens(separately, number)


def test_invalid_embedding_requests_are_rejected(case: tuple[PreTrainedModel, Runner]) -> None:
    _, runner = case
    scheduler = scheduler_of(runner, context_length=100, max_sequences=8)
    prompts = [[], [5] * 101, [5] * 100]
    outputs = drive(runner, scheduler, [Sequence.to_embed(Embed(id=n, prompt=p)) for n, p in enumerate(prompts)])
    assert [outputs[number][-1].finish for number in range(3)] == ["error", "error", "stop"]
    assert "no tokens" in (outputs[0][0].error or "")
    assert "the context has 100" in (outputs[1][0].error or "")


def test_non_finite_embedding_fails_only_its_request(case: tuple[PreTrainedModel, Runner]) -> None:
    reference, runner = case
    scheduler = scheduler_of(runner, max_sequences=8)
    sequences = [Sequence.to_embed(Embed(id=number, prompt=PROMPTS[3])) for number in range(2)]
    for sequence in sequences:
        scheduler.add(sequence)
    plan = scheduler.plan()
    outcome = runner.launch(build_step(plan)).read()
    hidden = {0: outcome.hidden[0], 1: np.full(64, np.nan, np.float32)}
    first, second = scheduler.commit(plan, outcome.tokens, hidden=hidden)
    assert_right(reference, sequences[0], "mean", [first])
    assert (second.finish, second.vector) == ("error", [])
    assert "not finite" in (second.error or "")
    assert scheduler.committer.take_pages_to_clear()
    scheduler.check_idle()
