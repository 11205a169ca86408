"""Recorded steps: replayed, they give what the same kernels give one by one."""

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helexa.neuron.engine.execution.step_buffers import StepBuffers
from helexa.neuron.engine.execution.step_builder import build_step
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.ops.attention_kind import AttentionKind
from helexa.neuron.ops.batch import Batch, Capacity
from helexa.neuron.ops.constants import PAGE_SIZE
from helexa.neuron.ops.kernel_header import CONSTANTS
from helexa.neuron.ops.native.compiler import native_kernels
from helexa.neuron.ops.native.kernel_library import INSTRUCTION_BYTES, KernelLibrary
from helexa.neuron.ops.native.native import NativeOps
from helexa.neuron.processes import heartbeat
from neuron.ops import paged, random_weights

VOCABULARY, HIDDEN, HEADS, KV_HEADS, DIM = 100, 256, 8, 2, 32
KIND = AttentionKind(DIM**-0.5)
PAGES = 32
CAPACITY = Capacity(rows=128, sequences=16, pages_per_sequence=PAGES)


class Model:
    """One layer of every kernel; its weights are the same each time."""

    def __init__(self, ops: NativeOps) -> None:
        torch.manual_seed(1)
        self.ops = ops
        self.embed = ops.matrix(random_weights.make("Q8_0", VOCABULARY, HIDDEN))
        self.norm = ops.rms_norm(torch.rand(HIDDEN) + 0.5, 1e-5)
        qkv = random_weights.make("Q4_K", (HEADS + 2 * KV_HEADS) * DIM, HIDDEN)
        self.qkv = ops.linear([ops.matrix(qkv)], torch.randn((HEADS + 2 * KV_HEADS) * DIM))
        self.gate_up = ops.linear([ops.matrix(random_weights.make("Q6_K", 512, HIDDEN))], None)
        self.down = ops.linear([ops.matrix(random_weights.make("bfloat16", HIDDEN, 256))], None)
        self.head = ops.linear([self.embed], None)
        self.frequencies = torch.rand(DIM // 2)
        self.cache = ops.new_cache(KV_HEADS, PAGES, DIM)

    def forward(self, batch: Batch) -> Tensor:
        ops = self.ops
        hidden = ops.embedding(self.embed, batch.tokens)
        qkv = self.qkv(self.norm(hidden)).view(len(batch.tokens), -1, DIM)
        rope = ops.rope_tables(batch.positions, self.frequencies)
        queries = ops.rotate_store(qkv, HEADS, rope, self.cache, batch.slots)
        delta = ops.attend(queries, self.cache, batch, KIND).view(len(batch.tokens), -1)
        delta = self.down(ops.gate_mul(self.gate_up(self.norm(hidden, delta)), "silu"))
        return self.head(self.norm(*(ops.choose_rows(part, batch.sample_rows) for part in (hidden, delta))))


class Runs:
    """Steps in one place, as an engine has it."""

    def __init__(self, library: KernelLibrary, forward: Callable[[Model, Batch], Tensor] = Model.forward) -> None:
        self.ops = NativeOps(library, 2)
        self.model = Model(self.ops)
        self.buffers = StepBuffers(CAPACITY, paged.CPU, packed=False)
        self.calls = 0
        self._forward = forward

    @torch.inference_mode()
    def step(self, plan: list[PlanEntry]) -> Tensor:
        return self.ops.run(self._counted, self.buffers.load(build_step(plan))).clone()

    def _counted(self, batch: Batch) -> Tensor:
        self.calls += 1
        return self._forward(self.model, batch)


def plan_of(step: int, *rows: int) -> list[PlanEntry]:
    """Sequences of other tokens, lengths and pages at each step; several rows are a prompt's beginning."""
    plan: list[PlanEntry] = []
    for number, count in enumerate(rows):
        pages = [(step + 3 * number + n) % PAGES for n in range(3)] if number else list(range(step, step + 12))
        computed = 0 if count > 1 else (100 if number else 600) + step
        plan.append(paged.entry((7 * step + number) % VOCABULARY, computed, count, pages))
    return plan


def test_a_replay_gives_what_kernels_give_one_by_one(library: KernelLibrary) -> None:
    """A step of 1 row, 9 rows, or 3 and a chunk, again and again with other tokens, positions and pages."""
    recorded, calls = Runs(library), 0
    for step in range(4):
        for rows in ([1], [1] * 9, [1, 1, 1, 20]):
            plan = plan_of(step, *rows)
            fresh = Runs(library, lambda model, batch: model.forward(batch) + 0.0)
            fresh.model.cache.copy_(recorded.model.cache)
            assert torch.equal(recorded.step(plan), fresh.step(plan))
            assert torch.equal(recorded.model.cache, fresh.model.cache)
            assert fresh.ops._graphs.sound is False
        calls = calls or recorded.calls
    assert recorded.calls == calls


def test_an_operation_of_torch_is_not_left_out_of_later_steps(
    library: KernelLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    """Such steps run kernel by kernel, and what comes before the operation is not done twice."""

    def tripled(model: Model, batch: Batch) -> Tensor:
        hidden = model.ops.embedding(model.embed, batch.tokens)
        model.norm(hidden, hidden)
        return hidden * 3.0

    caplog.set_level(logging.INFO, "helexa.neuron.ops")
    runs = Runs(library, tripled)
    rows = runs.ops.embedding(runs.model.embed, torch.arange(VOCABULARY, dtype=torch.int32))
    for step in range(3):
        (entry,) = plan = plan_of(step, 1)
        assert torch.equal(runs.step(plan), rows[entry.sequence.tokens[-1:]] * 6.0)
    assert len(caplog.records) == 1
    assert "steps run kernel by kernel" in caplog.text


def test_what_is_not_to_be_recorded_runs_once_each_time(library: KernelLibrary) -> None:
    recorded, other = Runs(library), Runs(library)
    for step in range(3):
        plan = plan_of(step, 1, 1)
        with torch.inference_mode():
            batch = other.buffers.load(build_step(plan))
            result = other.ops.run(other._counted, batch, recorded=False)
        assert other.calls == step + 1
        assert torch.equal(result, recorded.step(plan))


def test_what_torch_hands_to_a_kernel_is_not_looked_for_once_it_is_gone() -> None:
    """It is neither an input nor in the workspace; a process of its own, since it would be an address of nothing."""
    code = "from neuron.ops.test_graph import rows_chosen_by_torch; rows_chosen_by_torch()"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr.decode()[-500:]


def rows_chosen_by_torch() -> None:
    """A forward pass whose embedding reads tokens that torch has computed."""
    runs = Runs(native_kernels(), lambda model, batch: model.ops.embedding(model.embed, batch.tokens + 1))
    rows = runs.ops.embedding(runs.model.embed, torch.arange(VOCABULARY, dtype=torch.int32))
    for step in range(3):
        (entry,) = plan = plan_of(step, 1)
        assert torch.equal(runs.step(plan), rows[entry.sequence.tokens[-1] + 1][None])


def test_a_step_without_a_result_is_recorded_once(library: KernelLibrary) -> None:
    """A chunk of a prompt that does not reach its end."""
    runs = Runs(library)
    runs.step(plan_of(0, 1))
    (entry,) = plan_of(0, 20)
    entry.sequence.tokens.append(0)
    entry = PlanEntry(entry.sequence, 20)
    assert not entry.samples
    runs.step([entry])
    calls = runs.calls
    runs.step([entry])
    assert runs.calls == calls


def test_a_replayed_step_counts_progress_at_every_kernel(library: KernelLibrary) -> None:
    """The watchdog of a slow engine sees that a long step advances."""
    runs = Runs(library)
    runs.step(plan_of(0, 1, 30))
    calls, recordings = runs.calls, runs.ops._graphs._kept.values()
    kernels = max(len(recording.tape) // INSTRUCTION_BYTES for recording in recordings)
    before = progress()
    runs.step(plan_of(1, 1, 30))
    assert runs.calls == calls, "the step was recorded again instead of replayed"
    assert progress() - before >= kernels > 10


def progress() -> int:
    return ctypes.c_int64.from_address(heartbeat.kernel_count_address()).value


def test_recordings_that_were_forgotten_are_made_again(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helexa.neuron.ops.native.captured_graph._KEPT_BYTES", 10 * 300)  # of two kernels each
    runs = Runs(library, lambda model, batch: model.norm(model.ops.embedding(model.embed, batch.tokens)))
    first, calls = runs.step(plan_of(0, 1)), runs.calls
    shapes = [(1, count) for count in range(2, 50)] + [(1, 1, count) for count in range(2, 50)]
    for shape in shapes:
        runs.step(plan_of(0, *shape))
        assert runs.ops._graphs.kept_bytes <= 10 * 300
    for _ in range(2):
        assert torch.equal(runs.step(plan_of(0, 1)), first)
    assert runs.calls == calls + len(shapes) + 1
    for _ in range(2):
        for shape in shapes[-5:]:
            runs.step(plan_of(0, *shape))
    assert runs.calls == calls + len(shapes) + 1


def test_a_result_that_is_held_is_not_written_over_by_its_own_shape(library: KernelLibrary) -> None:
    runs = Runs(library)

    def run(step: int) -> Tensor:
        return runs.ops.run(runs.model.forward, runs.buffers.load(build_step(plan_of(step, 1, 1))))

    with torch.inference_mode():
        first = run(0)
        kept = first.clone()
        other = run(1)
        assert torch.equal(first, kept)
        assert not torch.equal(other, kept)


def test_results_of_many_shapes_lie_in_the_same_memory(library: KernelLibrary) -> None:
    runs, places = Runs(library), set[int]()
    with torch.inference_mode():
        for _ in range(2):
            for count in range(5, 9):
                batch = runs.buffers.load(build_step(plan_of(0, *[1] * count)))
                places.add(runs.ops.run(runs.model.forward, batch).data_ptr())
    assert len(places) < 4


def test_a_tape_that_is_too_long_is_refused(library: KernelLibrary) -> None:
    table = torch.ones(1, PAGE_SIZE).bfloat16()
    out = torch.zeros(1, PAGE_SIZE)
    most = CONSTANTS["MAX_INSTRUCTIONS"]
    instruction = library.instruction("narrow", {"x": out, "out": table, "rows": 1, "columns": PAGE_SIZE})
    library.run(instruction * most)
    assert not table.any()
    with pytest.raises(ValueError, match=str(most + 1)):
        library.run(instruction * (most + 1))
