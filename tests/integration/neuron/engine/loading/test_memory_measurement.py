"""Measured GPU memory, with a simulated GPU that only counts bytes."""

from pathlib import Path

import pytest
import torch
from page_table_ops import TabledOps

from helexa.core.errors import DoesNotFitError
from helexa.core.node_reports import DeviceHealth
from helexa.neuron.engine.execution.step_memory import DeviceMemory, StepMemory
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import MemoryGrant
from helexa.neuron.engine.loading import backend_kernels_and_kv_dtype
from helexa.neuron.engine.loading.kv_cache_size_and_memory_request import least_free
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.loading.loaded_model_and_measured_memory import (
    LoadedModel,
    largest,
    measured,
    measured_on_device,
)
from helexa.neuron.engine.loading.memory_division import divide_free_memory
from helexa.neuron.engine.ranks.messages import Allocate, RankAllocated, RankMemory, ReportMemory, RunStep, digest_of
from helexa.neuron.engine.ranks.rank import Rank
from helexa.neuron.engine.step_input_and_graph_sizes import encode
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.kernel_selection import SelectedKernels
from neuron.memory_requests import MIB, needs
from tiny_models import tiny_model


class SimulatedGpu:
    """A GPU with 8000 MiB, of which 1200 are allocated. 1000 of these are weights."""

    def __init__(self, free_mb: int = 8000) -> None:
        self.allocated = self.peak = 1200 * MIB
        self.cached = 50 * MIB
        self._size = free_mb * MIB

    def use(self, *sizes_mb: int) -> None:
        """Allocate and free each of `sizes_mb`, one after another."""
        self.peak = max(self.peak, *(self.allocated + size * MIB for size in sizes_mb))
        self.cached = self.peak - self.allocated

    def empty_cache(self) -> None:
        self.cached = 0

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def synchronize(self) -> None: ...

    def memory_allocated(self) -> int:
        return self.allocated

    def max_memory_allocated(self) -> int:
        return self.peak

    def memory_reserved(self) -> int:
        return self.allocated + self.cached

    def mem_get_info(self) -> tuple[int, int]:
        return self._size - self.memory_reserved(), self._size


def memory_of(gpu: SimulatedGpu, *sizes_mb: int) -> DeviceMemory:
    """Return the measurement of steps that allocate and free each of `sizes_mb`."""
    memory = StepMemory(1000 * MIB, gpu)
    gpu.use(*sizes_mb)
    return memory.read()


def simulate(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """Replace the memory statistics of `torch.cuda` by those of a simulated GPU."""
    gpu = SimulatedGpu()
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize", "mem_get_info", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    return gpu


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 256}
    tiny_model(tmp_path, model_type="llama", vocab_size=64, num_attention_heads=2, num_key_value_heads=2, **shape)
    return tmp_path


def test_memory_request_uses_measured_peaks_and_leaves_the_remainder_to_the_kv_cache() -> None:
    gpu = SimulatedGpu()
    gpu.use(3000)  # peak while loading
    estimate = needs(weights=900 * MIB, step=700 * MIB, share=0.8, pages=100_000, page_step=7, position_step=7)
    measurement = measured(estimate, [memory_of(gpu, 200, 300)], graphs=False)
    assert (measurement.weights, measurement.loading) == (1000 * MIB, 0)
    assert measurement.step == int(300 * 1.1 * MIB)
    assert measurement.free == 8000 * MIB, "memory that the engine holds counts as free for it"
    assert (measurement.page_step, measurement.position_step) == (0, 0)
    with_graphs = measured(estimate, [memory_of(gpu, 300)], graphs=True)
    assert with_graphs.step == 2 * measurement.step
    assert (
        divide_free_memory(measurement).pages
        > divide_free_memory(with_graphs).pages
        > divide_free_memory(estimate).pages // 2
    )
    with pytest.raises(DoesNotFitError) as rejected:
        divide_free_memory(measured(estimate, [memory_of(gpu, 8000)], graphs=False))
    assert rejected.value.details["activations_mb"] == 8800


def test_memory_request_for_several_ranks_uses_their_largest_need_and_least_free_memory() -> None:
    ranks = [DeviceMemory(700, 30, 5000), DeviceMemory(600, 40, 4000)]
    request = measured(needs(), ranks, graphs=True)
    assert (request.weights, request.step, request.free) == (700, 2 * 40, 4000)


def test_rank_reports_measured_step_memory_and_then_allocates_a_new_runner(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank answers the messages of rank 0 in its own process; here, without other ranks."""
    options = EngineOptions(dtype="float32", kernels="torch", kv_cache_mb=1, max_sequences=5, max_step_tokens=100)
    runner = load_once(tiny, options)
    gpu = simulate(monkeypatch)
    rank = Rank(runner._model, runner.ops, options, memory_fd=-1)
    request, grant = needs(context=256), MemoryGrant(total=0, pages=8, sequences=5, snapshots=0)
    assert rank.handle(Allocate(request, grant, measure=True)) == RankAllocated()
    gpu.use(300)
    for number, step in enumerate(largest(100, 5)):
        assert rank.handle(RunStep(number, encode(step), digest_of(encode(step)))) is None
    assert rank.handle(ReportMemory()) == RankMemory(DeviceMemory(gpu.allocated, int(330 * MIB), 8000 * MIB))
    assert rank.handle(Allocate(request, grant)) == RankAllocated(), "the measured runner is replaced"
    with pytest.raises(ValueError, match="rank 0 sent step 0, but this rank expected step 3"):
        rank.handle(RunStep(0, encode(step), digest_of(encode(step))))


def test_runner_measures_the_memory_of_the_largest_steps_before_it_allocates_the_cache(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        backend_kernels_and_kv_dtype,
        "select_kernels",
        lambda *a, **k: SelectedKernels(TabledOps(torch.device("cpu"), torch.float32), "small"),
    )
    options = EngineOptions(dtype="float32", kv_cache_mb=1, max_sequences=5, max_step_tokens=100)
    runner = load_once(tiny, options)
    gpu = simulate(monkeypatch)
    monkeypatch.setattr(runner.ops, "partials_bytes", lambda *sizes: 1000)  # workspace that short contexts do not need
    steps: list[None] = []
    estimate = needs(page=runner.facts.token_bytes * PAGE_SIZE, context=256)
    loaded = LoadedModel(runner._model, runner.ops, options)
    measurement = measured_on_device(loaded, estimate, 5, lambda: steps.append(None))
    assert len(steps) == len(largest(100, 5)), "one progress call per measured step"
    assert (measurement.weights, measurement.free) == (gpu.allocated, 8000 * MIB)
    assert measurement.step == 2 * 1000, "once for captured steps, once for other steps"
    runner = loaded.runner(measurement, divide_free_memory(measurement))
    short, prompt, tokens = largest(100, 5)
    assert [len(runner.launch(step).read().tokens) for step in (short, prompt, tokens)] == [1, 1, 5]
    assert [len(step.tokens) for step in (short, prompt)] == [32, 100]


def test_steps_run_to_measure_memory_cover_all_sampling_kernels() -> None:
    settings = [step.sampling for step in largest(2048, 2) if step.sampling is not None]
    found = set[tuple[bool, bool, bool]]()
    for sampling in settings:
        temperature, _, top_p, _ = sampling.filters[0].tolist()
        found.add((temperature > 0, top_p < 1, len(sampling.adjustments.tokens) > 0))
    assert found == {(False, False, False), (True, False, False), (True, True, True)}


def test_free_memory_reported_for_several_ranks_is_the_least_of_all_devices() -> None:
    readings = [DeviceHealth(index=i, vram_used_mb=0, vram_free_mb=free) for i, free in enumerate((900, 700, 100))]
    assert least_free(800 << 20, ["cuda:0", "cuda:1"], readings) == 700 << 20
    assert least_free(600 << 20, ["cuda:0", "cuda:1"], readings) == 600 << 20
    assert least_free(600 << 20, ["cuda:0", "cuda:1"], []) == 600 << 20, "the driver does not answer"
