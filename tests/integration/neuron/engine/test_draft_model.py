"""Draft models: outputs stay equal, pages are shared, and drafts that do not pay are rare."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from draft_models import DRAFT, TEXT, VOCABULARY, related_model, sentences, trained_model
from schedule_fuzz import SEQUENCES, AnyDrafts, Subject, count_differences, random_cases
from scheduler_runs import generate, scheduler_of

from helexa.core.errors import ModelFileError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.grammar_matcher import read_vocabulary
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest, SamplingParams
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.loading.memory_division import divide_free_memory
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.native.native_ops import NativeOps
from nightly import cases, daily

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama"},
    "hybrid": {
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "windowed": {"model_type": "mistral", "sliding_window": 24},
}
DRAWN = SamplingParams(seed=11)
OPTIONS = EngineOptions(kv_cache_mb=16, snapshot_mb=8, max_sequences=SEQUENCES, threads=1)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load_pair(model: Path, draft: Path, **options: Any) -> Runner:
    options = {"speculation_max_sequences": SEQUENCES, "draft_model": str(draft)} | options
    runner = load_once(model, msgspec.structs.replace(OPTIONS, **options))
    if runner.ops.name != NativeOps.name:
        pytest.skip("no C compiler on this machine")
    return runner


class Passes(AnyDrafts):
    """A gate that lets all sequences draft, and lists the rows of the passes of the draft model."""

    def __init__(self) -> None:
        super().__init__(random.Random(0), share=1.0)
        self.rows: list[int] = []

    def learn_pass(self, rows: int, seconds: float) -> None:
        self.rows.append(rows)


def always_drafting(scheduler: Scheduler) -> Passes:
    gate = scheduler.planner.gate = Passes()
    return gate


@pytest.mark.parametrize("kind", daily(["dense", "hybrid"], MODELS))
def test_speculation_with_a_draft_model_changes_no_output_in_random_schedules(kind: str, tmp_path: Path) -> None:
    related_model(tmp_path / "model", **TEXT | MODELS[kind])
    related_model(tmp_path / "draft", seed=1, **DRAFT)
    runner = load_pair(tmp_path / "model", tmp_path / "draft")
    subject = Subject(runner, read_vocabulary(tmp_path / "model", VOCABULARY), [], exact=True)
    counts: Counter[str] = Counter()
    for seed in range(cases(2, 40, "HELEXA_TEST_DRAFTS")):
        chance = random.Random(seed)
        found = count_differences(subject, random_cases(chance, subject, 12), chance)
        assert not found["different"], f"seed {seed}: {found}"
        counts += found
    assert counts["accepted"] > 50
    assert counts["drafted"] > counts["accepted"]  # some were rejected
    assert counts["preemptions"]
    assert counts["cached"]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), DRAWN])
def test_all_drafts_are_accepted_if_the_draft_model_is_the_model_itself(
    sampling: SamplingParams, tmp_path: Path
) -> None:
    related_model(tmp_path / "model", **TEXT | MODELS["dense"])
    runner = load_pair(tmp_path / "model", tmp_path / "model", kv_dtype="unquantized")
    prompts = [list(range(1, 30)), list(range(40, 49))]
    alone = generate(runner, scheduler_of(runner, speculation=False), prompts, 40, sampling)
    scheduler = scheduler_of(runner)
    always_drafting(scheduler)
    assert generate(runner, scheduler, prompts, 40, sampling) == alone
    drafts = scheduler.committer.model_drafts
    assert drafts.drafted == drafts.accepted > 40


def test_draft_model_reads_only_the_end_of_a_long_prompt_and_reuses_cached_pages(tmp_path: Path) -> None:
    related_model(tmp_path / "model", strength=4.0, **TEXT | MODELS["dense"])
    related_model(tmp_path / "draft", strength=4.0, seed=1, **DRAFT)
    runner = load_pair(tmp_path / "model", tmp_path / "draft")
    scheduler = scheduler_of(runner, prefix_reuse="all")
    gate = always_drafting(scheduler)
    prompt = [1 + (7 * n) % 250 for n in range(5 * PAGE_SIZE + 40)]
    (output,) = generate(runner, scheduler, [prompt], 2 * PAGE_SIZE, DRAWN)
    assert 32 <= gate.rows[0] < 32 + PAGE_SIZE
    assert max(gate.rows[1:]) <= 6
    continued = [*prompt, *output]
    gate.rows.clear()
    generate(runner, scheduler, [continued + [5] * (PAGE_SIZE // 4)], 8, DRAWN)
    assert gate.rows[0] <= 32 + PAGE_SIZE
    (sequence_rows,) = gate.rows[:1]
    assert sequence_rows == (len(continued) + PAGE_SIZE // 4 + 1) % PAGE_SIZE  # the full pages were shared


def test_memory_request_includes_weights_and_pages_of_model_and_draft_model(tmp_path: Path) -> None:
    related_model(tmp_path / "model", **TEXT | MODELS["dense"])
    related_model(tmp_path / "draft", seed=1, **DRAFT)
    requests: list[MemoryRequest] = []

    def ask(request: MemoryRequest) -> MemoryGrant:
        requests.append(request)
        return divide_free_memory(request)

    options = msgspec.structs.replace(OPTIONS, draft_model=str(tmp_path / "draft"))
    load_once(tmp_path / "model", options, ask=ask)
    load_once(tmp_path / "model", replace_draft(options), ask=ask)
    load_once(tmp_path / "draft", replace_draft(options), ask=ask)
    both, model, draft = requests
    assert both.weights == model.weights + draft.weights
    assert both.page == model.page + draft.page
    assert both.pages == OPTIONS.kv_cache_mb * 2**20 // both.page


def replace_draft(options: EngineOptions) -> EngineOptions:
    return msgspec.structs.replace(options, draft_model="")


def test_draft_model_with_another_vocabulary_is_rejected(tmp_path: Path) -> None:
    related_model(tmp_path / "model", **TEXT | MODELS["dense"])
    related_model(tmp_path / "draft", **DRAFT)
    tokenizer = tmp_path / "draft" / "tokenizer.json"
    settings = json.loads(tokenizer.read_text())
    vocabulary = settings["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    tokenizer.write_text(json.dumps(settings))
    with pytest.raises(ModelFileError, match=r"draft has another vocabulary than model: token \d+ is 'b', not 'a'"):
        load_pair(tmp_path / "model", tmp_path / "draft")


@pytest.mark.parametrize(
    ("settings", "options", "reason"),
    [
        (MODELS["hybrid"], {}, "draft models with recurrent layers"),
        (MODELS["dense"], {"tensor_parallel": 2}, "several processes"),
        (MODELS["dense"], {"speculation": False}, "speculation is off"),
    ],
)
def test_unusable_draft_model_is_rejected_with_the_reason(
    settings: dict[str, Any], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    related_model(tmp_path / "model", **TEXT | settings)
    with pytest.raises(ModelFileError, match=f"the draft model model cannot be used: .*{reason}"):
        load_pair(tmp_path / "model", tmp_path / "model", **options)


def test_draft_gate_admits_drafts_of_a_trained_model_and_stops_a_random_model(tmp_path: Path) -> None:
    trained_model(tmp_path / "model", 60, **TEXT | {"model_type": "llama", "num_hidden_layers": 2})
    trained_model(tmp_path / "trained", 60, **DRAFT)
    related_model(tmp_path / "random", **DRAFT)
    sampling = SamplingParams(temperature=0.7, seed=11)
    schedulers: dict[str, Scheduler] = {}
    for name in ("trained", "random"):
        runner = load_pair(tmp_path / "model", tmp_path / name)
        scheduler = schedulers[name] = scheduler_of(runner, step_timing="fixed")
        for seed in range(5):
            prompts = [sentences(random.Random(seed))[:24]]
            plain = generate(runner, scheduler_of(runner, speculation=False), prompts, 64, sampling)
            assert generate(runner, scheduler, prompts, 64, sampling) == plain
    trained, randomized = (schedulers[name].committer.model_drafts for name in ("trained", "random"))
    assert trained.accepted > 90
    assert trained.accepted > 0.6 * trained.drafted
    assert randomized.drafted < 30
    gains = [scheduler.drafts().gain for scheduler in schedulers.values()]
    assert gains[0] > 1.1 > 1.05 > gains[1]
