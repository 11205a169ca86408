"""Draft heads: outputs stay equal in all schedules, trained heads gain, and random ones are stopped."""

import json
import logging
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from draft_heads import DENSE, HYBRID, Eagle, Mtp, add_mtp, last_states, layer_inputs, likely_tokens, train, write_eagle
from draft_models import VOCABULARY, related_model
from safetensors.torch import load_file, save_file
from schedule_fuzz import SEQUENCES, Subject, count_differences, random_cases
from scheduler_runs import GREEDY, generate, scheduler_of
from test_draft_model import OPTIONS, always_drafting

from helexa.core.errors import ModelFileError
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.engine.execution.draft_head import CONTEXT, TAIL, HeadDrafter
from helexa.neuron.engine.execution.draft_model import CacheRows, step_of
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import sampling_of
from helexa.neuron.engine.grammar_matcher import read_vocabulary
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest, SamplingParams
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.loading.memory_division import divide_free_memory
from helexa.neuron.engine.scheduling.draft_length import DraftGate
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.step_input_and_graph_sizes import Float32, StepInput, int32
from helexa.neuron.engine.step_output_logprobs_and_pooling import StepInFlight
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.models import model_class
from helexa.neuron.models.draft_heads import EagleHead, gives_layer_inputs
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.native.kernel_library import native_kernels
from helexa.neuron.ops.native.native_ops import NativeOps
from http_listener import eventually
from nightly import cases

DRAWN = SamplingParams(temperature=0.7, seed=11)


@dataclass(frozen=True)
class Trained:
    """A model with a trained head."""

    folder: Path
    model: Any
    head: Any
    draft: Path | None = None  # folder of the head; None if it is in the folder of the model


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("mtp") / "model"
    model = related_model(folder, strength=4.0, **HYBRID)
    head = Mtp(model)
    train(head, model, last_states)
    add_mtp(folder, head)
    return Trained(folder, model, head)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("eagle")
    model = related_model(folder / "model", strength=4.0, **DENSE)
    head = Eagle(model, favorable=True)
    train(head, model, layer_inputs)
    write_eagle(folder / "head", head)
    return Trained(folder / "model", model, head, folder / "head")


@pytest.fixture(params=["mtp", "eagle"])
def trained(request: pytest.FixtureRequest) -> Trained:
    return request.getfixturevalue(request.param)


def load(folder: Path, draft: Path | None = None, **options: Any) -> Runner:
    options = options if draft is None else {"draft_model": str(draft)} | options
    runner = load_once(folder, msgspec.structs.replace(OPTIONS, speculation_max_sequences=SEQUENCES, **options))
    if runner.ops.name != NativeOps.name:
        pytest.skip("no C compiler on this machine")
    return runner


def generate_both(runner: Runner, scheduler: Scheduler, prompts: list[list[int]], sampling: SamplingParams) -> None:
    """Assert that `scheduler` yields the tokens of a scheduler without drafts."""
    plain = generate(runner, scheduler_of(runner, speculation=False), prompts, 64, sampling)
    assert generate(runner, scheduler, prompts, 64, sampling) == plain


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_about_half_of_the_drafts_of_a_trained_draft_head_are_accepted(
    sampling: SamplingParams, trained: Trained
) -> None:
    runner = load(trained.folder, trained.draft)
    scheduler = scheduler_of(runner)
    always_drafting(scheduler)
    generate_both(runner, scheduler, [likely_tokens(random.Random(seed), 20 * seed + 2) for seed in range(3)], sampling)
    drafts = scheduler.committer.model_drafts
    assert drafts.accepted > 60
    assert drafts.accepted > (0.5 if trained.draft is None else 0.4) * drafts.drafted


def test_speculation_with_a_draft_head_changes_no_output_in_random_schedules(trained: Trained) -> None:
    runner = load(trained.folder, trained.draft)
    subject = Subject(runner, read_vocabulary(trained.folder, VOCABULARY), [], exact=True)
    counts: Counter[str] = Counter()
    for seed in range(cases(2, 40, "HELEXA_TEST_DRAFTS")):
        chance = random.Random(seed)
        found = count_differences(subject, random_cases(chance, subject, 12), chance)
        assert not found["different"], f"seed {seed}: {found}"
        counts += found
    assert counts["accepted"] > 20
    assert counts["drafted"] > counts["accepted"]
    assert counts["preemptions"]
    assert counts["cached"]


def test_draft_gate_admits_drafts_of_a_trained_head_and_stops_a_random_head(trained: Trained, tmp_path: Path) -> None:
    folder, draft = trained.folder, trained.draft
    if draft is None:
        folder = tmp_path / "model"
        related_model(folder, strength=4.0, **HYBRID)
        add_mtp(folder, Mtp(trained.model))
    else:
        draft = tmp_path / "head"
        write_eagle(draft, Eagle(trained.model))
    schedulers: list[Scheduler] = []
    kept: list[Counter[bool]] = []
    for runner in (load(trained.folder, trained.draft), load(folder, draft)):
        scheduler = scheduler_of(runner, step_timing="fixed")
        schedulers.append(scheduler)
        kept.append(steps_that_keep(runner))
        for seed in range(4):
            generate_both(runner, scheduler, [likely_tokens(random.Random(seed), 24)], DRAWN)
    learned, randomized = (scheduler.committer.model_drafts for scheduler in schedulers)
    assert learned.accepted > 60
    assert randomized.drafted < 40  # in 252 steps
    gains = [scheduler.drafts().gain for scheduler in schedulers]
    assert gains[0] > 1.1 > 1.05 > gains[1]
    assert kept[0][False] == 0
    assert kept[1][False] > 100  # while the gate rests


def steps_that_keep(runner: Runner) -> Counter[bool]:
    """Return how many of the later steps keep hidden states for the draft head, and how many do not."""
    counts: Counter[bool] = Counter()
    launch = runner.launch

    def counting(step: StepInput, after: StepInFlight | None = None, keep: bool = False) -> StepInFlight:
        counts[keep] += 1
        return launch(step, after, keep)

    runner.launch = counting  # type: ignore[method-assign]
    return counts


def test_hidden_states_and_logits_of_an_eagle_head_equal_those_of_plain_torch(eagle: Trained) -> None:
    runner = load(eagle.folder, eagle.draft, kv_dtype="unquantized")
    tokens = likely_tokens(random.Random(5), 40)
    with torch.no_grad():
        expected = layer_inputs(eagle.model, torch.tensor([tokens]))[0]
    step = step_of([CacheRows(tokens, 0, 0, [0])], sampling_of([]))
    for wanted in (range(40), [7, 39]):
        runner.compute(msgspec.structs.replace(step, sample_rows=int32(list(wanted)), sampling=None))
        assert runner.model.kept is not None
        assert_close(runner.model.kept.read(len(wanted)), expected[list(wanted)])
    assert runner.draft_head is not None
    head = runner.draft_head.model
    assert isinstance(head, EagleHead)
    assert head.kept is not None
    # The row of a token has the hidden states of the token before.
    states = eagle.head.fc(expected[:-1])[None]
    rows, inputs = CacheRows(tokens[1:], 0, 0, [0]), expected[:-1].numpy()
    for draft in (11, 12, 13, None):
        head.set_inputs(inputs)
        logits, _ = runner.draft_head.compute(msgspec.structs.replace(step_of([rows], sampling_of([])), sampling=None))
        with torch.no_grad():
            wanted_logits, outputs = eagle.head.run(eagle.model, torch.tensor([tokens[1:]]), states)
        assert_close(logits.numpy(), wanted_logits[0, -1:])
        assert_close(head.kept.read(1), outputs[0, -1:])
        if draft is not None:
            rows, inputs = CacheRows([draft], len(tokens) - 1, 0, [0]), head.kept.read(1)
            tokens, states = [*tokens, draft], torch.cat((states, outputs[:, -1:]), 1)


def assert_close(found: Float32, expected: torch.Tensor) -> None:
    """Assert that the difference is the rounding of weights and activations to 16 bits."""
    expected = expected.detach()
    assert found.shape == tuple(expected.shape)
    difference = (torch.from_numpy(found) - expected).abs().max() / expected.abs().max()
    assert difference < 0.02, difference


def test_eagle_head_drafts_tokens_after_a_prompt_whose_prefix_was_cached(eagle: Trained) -> None:
    runner = load(eagle.folder, eagle.draft)
    scheduler = scheduler_of(runner, prefix_reuse="all")
    always_drafting(scheduler)
    prompt = likely_tokens(random.Random(2), 3 * PAGE_SIZE + 1)
    generate_both(runner, scheduler, [prompt], DRAWN)
    before = scheduler.committer.model_drafts.accepted
    generate_both(runner, scheduler, [prompt], DRAWN)  # only the last token is computed
    assert scheduler.queues.cached_tokens == 3 * PAGE_SIZE
    assert scheduler.committer.model_drafts.accepted > before + 5


async def test_eagle_head_drafts_after_a_prompt_that_was_read_from_disk(
    eagle: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_kernels()  # compiles the kernels, unless they are in the cache
    (tmp_path / "kernels").symlink_to(cache_root(None) / "kernels")
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path))
    options = msgspec.structs.replace(
        OPTIONS, draft_model=str(eagle.draft), prefix_disk_mb=1024, step_timing="fixed", prefix_reuse="all"
    )
    prompt = likely_tokens(random.Random(2), 6 * PAGE_SIZE + 1)
    computed = await answer_of_new_engine(eagle.folder, options, prompt)
    read = await answer_of_new_engine(eagle.folder, options, prompt)
    assert (computed[1], read[1]) == (0, 6 * PAGE_SIZE)
    assert computed[0] == read[0]


async def answer_of_new_engine(model: Path, options: EngineOptions, prompt: list[int]) -> tuple[list[int], int]:
    """Return the tokens, and the number of tokens of the prompt that were not computed, after some accepted drafts."""
    client = await EngineClient.start(model, options)
    try:
        outputs = [output async for output in client.generate(prompt, max_tokens=64, sampling=DRAWN, salt="a")]
        assert outputs[-1].error is None
        await eventually(lambda: client.drafts.accepted_model > 10)
    finally:
        await client.close()
    return [token for output in outputs for token in output.tokens], max(output.cached_tokens for output in outputs)


def test_memory_request_includes_the_weights_and_the_cache_of_an_eagle_head(eagle: Trained) -> None:
    requests: list[MemoryRequest] = []

    def ask(request: MemoryRequest) -> MemoryGrant:
        requests.append(request)
        return divide_free_memory(request)

    for draft in ("", str(eagle.draft)):
        load_once(eagle.folder, msgspec.structs.replace(OPTIONS, draft_model=draft), ask=ask)
    alone, both = requests
    parameters = sum(parameter.numel() for parameter in eagle.head.parameters())
    assert 2 * parameters <= both.weights - alone.weights < 2.2 * parameters  # in bfloat16
    cache = 4 * CONTEXT * 2 * 2 * 2 * 32  # of 4 sequences with 2 key heads and 2 value heads of 32 numbers of 16 bits
    assert both.step - alone.step > cache
    assert (both.page, both.pages) == (alone.page, alone.pages)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hidden_size": 32}, "config: 'hidden_size' is 32 in the draft head, but 64 in the model"),
        ({"target_hidden_size": 128}, "config: 'target_hidden_size' is 128 in the draft head, but 64 in the model"),
        ({"vocab_size": 321}, "config: 'vocab_size' is 321 in the draft head, but 320 in the model"),
        ({"draft_vocab_size": 256}, r"tensor d2t has shape \[288\]"),
        ({"num_hidden_layers": 2}, "config: 'num_hidden_layers' is 2, supported: 1"),
        ({"norm_before_residual": True}, "config: 'norm_before_residual' is True"),
        ({"eagle_config": {"norm_before_fc": True}}, "config: 'norm_before_fc' is True"),
        ({"eagle_config": {"norm_output": True}}, "config: 'norm_output' is True"),
        ({"parallel_drafting": True}, "config: 'parallel_drafting' is True"),
        ({"model_type": "qwen3"}, "config: 'model_type' of the draft head is 'qwen3', supported: 'llama'"),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
            r"the head reads the inputs of the layers \[2, 3, 4\], but the model has 4 layers",
        ),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"the head reads the inputs of the layers \[2, 2, 1\]"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "config: 'use_aux_hidden_state' is false"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": None,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            },
            r"the head reads the inputs of the layers \[2, 3, 4\], but the model has 4 layers",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [0] * 1000}, r"the layers \[0, 0.{0,78}, but the model has 4 layers"),
        ({"speculators_model_type": "eagle3"}, "heads in the format of the library 'speculators' are not supported"),
    ],
)
def test_eagle_head_of_another_model_is_rejected(
    settings: dict[str, Any], reason: str, eagle: Trained, tmp_path: Path
) -> None:
    write_eagle(tmp_path / "head", eagle.head, **settings)
    with pytest.raises(ModelFileError, match=f"the draft head head cannot be used: .*{reason}"):
        load(eagle.folder, tmp_path / "head")


def test_eagle_head_is_rejected_for_unsupported_architectures_and_several_processes(
    eagle: Trained, mtp: Trained
) -> None:
    with pytest.raises(ModelFileError, match=r"for models of the architecture 'qwen3_5' are not implemented"):
        load(mtp.folder, eagle.draft)
    with pytest.raises(ModelFileError, match=r"draft head head cannot be used: several processes"):
        load(eagle.folder, eagle.draft, tensor_parallel=2)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3"])
def test_architectures_like_llama_support_eagle_heads(model_type: str) -> None:
    assert gives_layer_inputs(model_class(model_type))


@pytest.mark.parametrize("model_type", ["gemma2", "gemma4", "glm4", "granite", "olmo2", "nemotron_h", "qwen3_next"])
def test_architectures_unlike_llama_do_not_support_eagle_heads(model_type: str) -> None:
    assert not gives_layer_inputs(model_class(model_type))


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 15, 31]}, (1, 15, 31)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),  # outputs of layers
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}, (2, 16, 29)),  # inputs of layers
    ],
)
def test_eagle_head_reads_the_model_layers_that_its_configuration_names(
    settings: dict[str, Any], layers: tuple[int, ...]
) -> None:
    assert EagleHead.input_layers(settings, 32) == layers


def states_of(first: int, stop: int) -> Float32:
    return np.arange(first, stop, dtype=np.float32)[:, None]


def test_draft_head_reads_each_hidden_state_once_and_restarts_when_its_context_is_full() -> None:
    drafter = HeadDrafter(DraftGate())
    assert not drafter.prepare(40)
    drafter.keep(0, states_of(0, 40))
    assert drafter.prepare(41)
    assert [int(state) for (state,) in drafter.unread(41)] == list(range(40 - TAIL, 40))
    drafter.context, drafter.read = 0, 40
    drafter.keep(40, states_of(40, 44))  # of three drafts, of which one is accepted
    assert drafter.prepare(43)
    assert [int(state) for (state,) in drafter.unread(43)] == [40, 41]
    drafter.read = 42
    assert not drafter.prepare(46)  # the states of 44 and 45 are missing
    for position in range(42, CONTEXT):
        drafter.keep(position, states_of(position, position + 1))
        assert drafter.prepare(position + 2)
        drafter.read = position + 1
    assert drafter.first > CONTEXT - 2 * TAIL
    drafter.forget()
    assert not drafter.prepare(CONTEXT + 1)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"mtp.fc.weight": torch.zeros(64, 192)}, r"tensor fc\.weight has shape \[64, 192\]"),
        ({"mtp.norm.weight": None}, r"no tensor model\.norm\.weight"),
        ({"mtp.layers.1.mlp.up_proj.weight": torch.zeros(96, 64)}, r"does not read: mtp\.layers\.1\."),
    ],
)
def test_model_with_an_invalid_mtp_head_is_loaded_without_the_head(
    tensors: dict[str, torch.Tensor | None], reason: str, mtp: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in mtp.folder.iterdir():
        (folder / path.name).symlink_to(path)
    stored = load_file(mtp.folder / "mtp.safetensors") | tensors
    (folder / "mtp.safetensors").unlink()
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "mtp.safetensors")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.unlink()
    others = {name: file for name, file in index["weight_map"].items() if not name.startswith("mtp.")}
    path.write_text(json.dumps({"weight_map": others | dict.fromkeys(kept, "mtp.safetensors")}))
    with caplog.at_level(logging.WARNING):
        runner = load(folder)
    assert runner.draft_head is None
    assert runner.facts.drafts is None
    (message,) = [record.message for record in caplog.records if "draft head" in record.message]
    assert re.search(rf"draft head \(MTP\) not used path=\S*/model error=.*{reason}", message)


@pytest.mark.parametrize("options", [{"speculation": False}, {"speculation_max_sequences": 0}])
def test_mtp_head_is_not_loaded_without_speculation(options: dict[str, Any], mtp: Trained) -> None:
    runner = load_once(mtp.folder, msgspec.structs.replace(EngineOptions(kv_cache_mb=16, threads=1), **options))
    assert runner.draft_head is None
