"""Captured graphs: a replay gives the same results as running the kernels one by one."""

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.step_input_and_graph_sizes import StepBuffers
from helexa.neuron.ops.batch import AttentionKind, Batch, Capacity
from helexa.neuron.ops.convolution import ConvOp, ConvSizes, ConvWeights
from helexa.neuron.ops.kernel_header import CONSTANTS, PAGE_SIZE
from helexa.neuron.ops.native.kernel_library import INSTRUCTION_BYTES, KernelLibrary, native_kernels
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.state_cache import ConvCache
from helexa.neuron.processes import heartbeat
from neuron.ops import paging, random_weights

VOCABULARY, HIDDEN, HEADS, KV_HEADS, DIM = 100, 256, 8, 2, 32
KIND = AttentionKind(DIM**-0.5)
PAGES = 32
CAPACITY = Capacity(rows=128, sequences=16, pages_per_sequence=PAGES)


class Model:
    """A layer that uses every kernel; every instance has the same weights."""

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
        return self.head(self.norm(*(ops.choose_rows(x, batch.sample_rows) for x in (hidden, delta))))


class Runs:
    """A model, its kernels and its step buffers, as an engine has them."""

    def __init__(self, library: KernelLibrary, forward: Callable[[Model, Batch], Tensor] = Model.forward) -> None:
        self.ops = NativeOps(library, 2)
        self.model = Model(self.ops)
        self.buffers = StepBuffers(CAPACITY, paging.CPU, packed=False)
        self.calls = 0
        self._forward = forward

    @torch.inference_mode()
    def step(self, plan: list[PlanEntry]) -> Tensor:
        return self.ops.run(self._counted, self.buffers.load(build_step(plan))).clone()

    def _counted(self, batch: Batch) -> Tensor:
        self.calls += 1
        return self._forward(self.model, batch)


def plan_of(step: int, *rows: int) -> list[PlanEntry]:
    """A plan whose tokens, lengths and pages depend on `step`. A count above 1 is the beginning of a prompt."""
    plan: list[PlanEntry] = []
    for number, count in enumerate(rows):
        pages = [(step + 3 * number + n) % PAGES for n in range(3)] if number else list(range(step, step + 12))
        computed = 0 if count > 1 else (100 if number else 600) + step
        plan.append(paging.entry((7 * step + number) % VOCABULARY, computed, count, pages))
    return plan


def test_graph_replay_matches_kernels_run_one_by_one(library: KernelLibrary) -> None:
    """Replay steps of 1 row, of 9 rows, and of 3 rows plus a chunk with new tokens, positions and pages."""
    replayed, calls = Runs(library), 0
    for step in range(4):
        for rows in ([1], [1] * 9, [1, 1, 1, 20]):
            plan = plan_of(step, *rows)
            fresh = Runs(library, lambda model, batch: model.forward(batch) + 0.0)
            fresh.model.cache.copy_(replayed.model.cache)
            assert torch.equal(replayed.step(plan), fresh.step(plan))
            assert torch.equal(replayed.model.cache, fresh.model.cache)
            assert fresh.ops._graphs.complete is False
        calls = calls or replayed.calls
    assert replayed.calls == calls


def test_step_with_a_torch_operation_runs_kernel_by_kernel_and_is_not_captured(
    library: KernelLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    """A step with a torch operation runs kernel by kernel, and runs the kernels before it only once."""

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


def test_first_step_with_a_torch_operation_advances_recurrent_states_once(library: KernelLibrary) -> None:
    """The check for torch operations runs the forward pass several times."""

    def convolved(model: Model, convolution: ConvOp, cache: ConvCache, batch: Batch) -> Tensor:
        x = model.qkv(model.norm(model.ops.embedding(model.embed, batch.tokens)))
        return convolution(x, cache, batch, None) + 0.0

    plan, sizes = plan_of(0, 1), ConvSizes((HEADS + 2 * KV_HEADS) * DIM // 3, 4)
    results: list[tuple[Tensor, Tensor]] = []
    for capture in (True, False):
        runs = Runs(library)
        convolution = runs.ops.short_convolution(sizes, ConvWeights(torch.ones(4, sizes.width)))
        cache = convolution.new_cache(1)
        cache.conv.zero_()
        call = partial(convolved, runs.model, convolution, cache)
        with torch.inference_mode():
            results.append((runs.ops.run(call, runs.buffers.load(build_step(plan)), capture), cache.conv))
    (result, state), (expected, expected_state) = results
    assert torch.equal(result, expected)
    assert torch.equal(state, expected_state)


def test_step_run_without_capture_calls_the_model_each_time(library: KernelLibrary) -> None:
    replayed, uncaptured = Runs(library), Runs(library)
    for step in range(3):
        plan = plan_of(step, 1, 1)
        with torch.inference_mode():
            batch = uncaptured.buffers.load(build_step(plan))
            result = uncaptured.ops.run(uncaptured._counted, batch, capture=False)
        assert uncaptured.calls == step + 1
        assert torch.equal(result, replayed.step(plan))


def test_graphs_give_the_same_results_while_other_programs_use_all_cores(library: KernelLibrary) -> None:
    """While other programs use all cores, graphs run on fewer threads than the library has."""
    runs = Runs(library)
    runs.ops._library.start_threads(2 * (os.cpu_count() or 1))
    plan = [paging.entry(1, 0, 70, [0, 1])]
    expected = runs.step(plan)
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        for _ in range(1500):
            assert torch.equal(runs.step(plan), expected)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_graph_replay_does_not_read_a_freed_torch_tensor() -> None:
    """The tensor is neither an input nor in the workspace. A subprocess, because reading freed memory could crash."""
    code = "from neuron.ops.test_graph import rows_chosen_by_torch; rows_chosen_by_torch()"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()[-500:]


def rows_chosen_by_torch() -> None:
    """Run a forward pass whose embedding reads tokens that torch has computed."""
    runs = Runs(native_kernels(), lambda model, batch: model.ops.embedding(model.embed, batch.tokens + 1))
    rows = runs.ops.embedding(runs.model.embed, torch.arange(VOCABULARY, dtype=torch.int32))
    for step in range(3):
        (entry,) = plan = plan_of(step, 1)
        assert torch.equal(runs.step(plan), rows[entry.sequence.tokens[-1] + 1][None])


def test_step_that_returns_no_rows_is_captured_once(library: KernelLibrary) -> None:
    """The step is a chunk that does not reach the end of its prompt."""
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


def test_graph_replay_counts_heartbeats_at_every_kernel(library: KernelLibrary) -> None:
    """The watchdog needs the progress count to see that a long step still advances."""
    runs = Runs(library)
    runs.step(plan_of(0, 1, 30))
    calls, graphs = runs.calls, runs.ops._graphs._graphs.values()
    kernels = max(len(graph.calls) // INSTRUCTION_BYTES for graph in graphs)
    previous = progress()
    runs.step(plan_of(1, 1, 30))
    assert runs.calls == calls, "the step was captured again instead of replayed"
    assert progress() - previous >= kernels > 10


def progress() -> int:
    return ctypes.c_int64.from_address(heartbeat.kernel_count_address()).value


def test_evicted_captured_graphs_are_captured_again(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helexa.neuron.ops.native.captured_graph._MAX_BYTES", 10 * 300)  # 10 graphs of two kernels each
    runs = Runs(library, lambda model, batch: model.norm(model.ops.embedding(model.embed, batch.tokens)))
    first, calls = runs.step(plan_of(0, 1)), runs.calls
    shapes = [(1, count) for count in range(2, 50)] + [(1, 1, count) for count in range(2, 50)]
    for shape in shapes:
        runs.step(plan_of(0, *shape))
        assert runs.ops._graphs.call_bytes <= 10 * 300
    for _ in range(2):
        assert torch.equal(runs.step(plan_of(0, 1)), first)
    assert runs.calls == calls + len(shapes) + 1
    for _ in range(2):
        for shape in shapes[-5:]:
            runs.step(plan_of(0, *shape))
    assert runs.calls == calls + len(shapes) + 1


def test_result_that_is_still_held_is_not_overwritten_by_the_next_replay(library: KernelLibrary) -> None:
    runs = Runs(library)

    def run(step: int) -> Tensor:
        return runs.ops.run(runs.model.forward, runs.buffers.load(build_step(plan_of(step, 1, 1))))

    with torch.inference_mode():
        first = run(0)
        expected = first.clone()
        second = run(1)
        assert torch.equal(first, expected)
        assert not torch.equal(second, expected)


def test_results_of_graphs_of_many_shapes_share_memory(library: KernelLibrary) -> None:
    runs, places = Runs(library), set[int]()
    with torch.inference_mode():
        for _ in range(2):
            for count in range(5, 9):
                batch = runs.buffers.load(build_step(plan_of(0, *[1] * count)))
                places.add(runs.ops.run(runs.model.forward, batch).data_ptr())
    assert len(places) < 4


def test_graph_with_too_many_instructions_is_rejected(library: KernelLibrary) -> None:
    table = torch.ones(1, PAGE_SIZE).bfloat16()
    out = torch.zeros(1, PAGE_SIZE)
    most = CONSTANTS["MAX_INSTRUCTIONS"]
    instruction = library.instruction("narrow", {"x": out, "out": table, "rows": 1, "columns": PAGE_SIZE})
    library.run(instruction * most)
    assert not table.any()
    with pytest.raises(ValueError, match=str(most + 1)):
        library.run(instruction * (most + 1))
