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
from draft_heads import HYBRID, Mtp, add_mtp, last_states, likely_tokens, train
from draft_models import VOCABULARY, related_model
from safetensors.torch import load_file, save_file
from schedule_fuzz import SEQUENCES, Subject, count_differences, random_cases
from scheduler_runs import GREEDY, generate, scheduler_of
from test_draft_model import OPTIONS, always_drafting

from helexa.neuron.engine.execution.draft_head import CONTEXT, TAIL, HeadDrafter
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.messages import EngineOptions, SamplingParams
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.draft_gate import DraftGate
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.step.grammar_matcher import read_vocabulary
from helexa.neuron.engine.step.step_input import Float32, StepInput
from helexa.neuron.engine.step.step_output import StepInFlight
from helexa.neuron.ops.native.native import NativeOps
from nightly import cases

DRAWN = SamplingParams(temperature=0.7, seed=11)


@dataclass(frozen=True)
class Trained:
    """A model whose checkpoint has a trained head."""

    folder: Path
    model: Any
    head: Any


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


def load(folder: Path, **options: Any) -> Runner:
    runner = load_once(folder, msgspec.structs.replace(OPTIONS, speculation_max_sequences=SEQUENCES, **options))
    if runner.ops.name != NativeOps.name:
        pytest.skip("no C compiler on this machine")
    return runner


def generate_both(runner: Runner, scheduler: Scheduler, prompts: list[list[int]], sampling: SamplingParams) -> None:
    """Assert that `scheduler` yields the tokens of a scheduler without drafts."""
    plain = generate(runner, scheduler_of(runner, speculation=False), prompts, 64, sampling)
    assert generate(runner, scheduler, prompts, 64, sampling) == plain


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_most_drafts_of_a_trained_mtp_head_are_accepted(sampling: SamplingParams, mtp: Trained) -> None:
    runner = load(mtp.folder)
    scheduler = scheduler_of(runner)
    always_drafting(scheduler)
    generate_both(runner, scheduler, [likely_tokens(random.Random(seed), 20 * seed + 2) for seed in range(3)], sampling)
    drafts = scheduler.committer.model_drafts
    assert drafts.accepted > 60
    assert drafts.accepted > 0.5 * drafts.drafted


def test_mtp_head_changes_no_output_in_any_schedule(mtp: Trained) -> None:
    runner = load(mtp.folder)
    subject = Subject(runner, read_vocabulary(mtp.folder, VOCABULARY), [], exact=True)
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


def test_gate_lets_a_trained_head_draft_and_stops_a_random_one(mtp: Trained, tmp_path: Path) -> None:
    related_model(tmp_path / "model", strength=4.0, **HYBRID)
    add_mtp(tmp_path / "model", Mtp(mtp.model))
    schedulers: list[Scheduler] = []
    kept: list[Counter[bool]] = []
    for folder in (mtp.folder, tmp_path / "model"):
        runner = load(folder)
        scheduler = scheduler_of(runner, step_timing="fixed")
        schedulers.append(scheduler)
        kept.append(steps_that_keep(runner))
        for seed in range(4):
            generate_both(runner, scheduler, [likely_tokens(random.Random(seed), 24)], DRAWN)
    trained, randomized = (scheduler.committer.model_drafts for scheduler in schedulers)
    assert trained.accepted > 60
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


def states_of(first: int, stop: int) -> Float32:
    return np.arange(first, stop, dtype=np.float32)[:, None]


def test_drafter_reads_each_known_hidden_state_once_and_starts_again_when_its_context_is_full() -> None:
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
def test_model_with_an_invalid_mtp_head_is_loaded_without_it(
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
    assert re.search(rf"the draft head \(MTP\) of model is not used: .*{reason}", message)


@pytest.mark.parametrize("options", [{"speculation": False}, {"speculation_max_sequences": 0}])
def test_mtp_head_is_not_loaded_without_speculation(options: dict[str, Any], mtp: Trained) -> None:
    runner = load_once(mtp.folder, msgspec.structs.replace(EngineOptions(kv_cache_mb=16, threads=1), **options))
    assert runner.draft_head is None
