"""Captured graphs: steps padded to a bucket and captured before the first request give the same tokens."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from page_table_ops import TabledOps
from scheduler_runs import generate, scheduler_of

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.loading import backend_kernels_and_kv_dtype
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import StepBuffers, StepInput, buckets
from helexa.neuron.ops.batch import Batch, Bucket, Capacity
from helexa.neuron.ops.kernel_header import PAGE_SIZE
from helexa.neuron.ops.kernel_selection import SelectedKernels
from helexa.neuron.ops.triton.launch_and_graphs import CudaCapture
from tiny_models import tiny_model

CPU = torch.device("cpu")
TOKENS = 12
PROMPTS = [[(90 + 37 * n + 7 * i) % 512 for i in range(length)] for n, length in enumerate((1, 5, 45, 63, 64, 65, 130))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
    tiny_model(folder, model_type="llama", vocab_size=512, num_attention_heads=6, num_key_value_heads=2, **shape)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Tokens of each prompt by the reference kernels, in separate batches."""
    plain = load_once(model, EngineOptions(dtype="float32", kv_cache_mb=4))
    return [generate(plain, scheduler_of(plain), [prompt], TOKENS)[0] for prompt in PROMPTS]


def graph_runner(model: Path, **options: int) -> Runner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            backend_kernels_and_kv_dtype,
            "select_kernels",
            lambda *a, **k: SelectedKernels(TabledOps(CPU, torch.float32), "ops under test"),
        )
        return load_once(model, EngineOptions(dtype="float32", kv_cache_mb=4, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runner(model: Path) -> Runner:
    runner = graph_runner(model, max_sequences=6)
    progress: list[tuple[int, int]] = []
    runner.warm_up(lambda done, total: progress.append((done, total)))
    assert progress == [(done, 8) for done in range(8)]
    return runner


@pytest.mark.parametrize(
    ("error", "continues"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_model_is_usable_after_a_failed_graph_capture(
    model: Path, expected: list[list[int]], error: Exception, continues: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = graph_runner(model, max_sequences=6)
    record, captured = runner.ops.capture, list[Bucket | None]()

    def fail(forward: Callable[[Batch], torch.Tensor], blank: Batch) -> None:
        if len(captured) == 2:
            raise error
        record(forward, blank)
        captured.append(blank.bucket)

    monkeypatch.setattr(runner.ops, "capture", fail)
    if not continues:
        with pytest.raises(type(error)):
            runner.warm_up()
        return
    runner.warm_up()
    assert captured
    assert not runner.buckets
    for bucket in captured:
        assert bucket is not None
        assert runner.ops.run(lambda batch: batch.tokens, runner._buffers.load(StepInput.blank(bucket))).dim() == 1, (
            "the graph was not discarded"
        )
    assert generate(runner, scheduler_of(runner, max_sequences=6), PROMPTS, TOKENS) == expected


class FakeCuda:
    """A replacement for `torch.cuda`: captured code runs at once, and a failed capture leaves its stream current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = "the default stream"
        for name in ("stream", "graph", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)

    def current_stream(self) -> str:
        return self.current

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        previous, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = previous

    @contextmanager
    def graph(self, graph: object, pool: object = None, capture_error_mode: str = "global") -> Iterator[None]:
        previous, self.current = self.current, "the capture stream"
        yield
        self.current = previous

    def pool(self) -> str:
        return "a pool"

    def replay(self) -> None: ...


def test_captured_cuda_graphs_share_one_output_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    capture = CudaCapture()
    replays = [capture(lambda length=length: torch.full((length, 3), float(length))) for length in (4, 2, 1)]
    outputs = [replay() for replay in replays]
    assert [tuple(output.shape) for output in outputs] == [(4, 3), (2, 3), (1, 3)]
    assert len({output.data_ptr() for output in outputs}) == 1
    assert outputs[0][:, 0].tolist() == [1, 2, 4, 4], "replays overwrite each other's output; the last one is valid"


def test_current_cuda_stream_is_restored_if_the_graph_capture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def capture_fails() -> torch.Tensor:
        if cuda.current != "the default stream":
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1, 3)

    with pytest.raises(RuntimeError, match="capturing"):
        CudaCapture()(capture_fails)
    assert cuda.current == "the default stream"


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize(
    "options", [{}, {"max_step_tokens": 16}, {"pages": 7}, {"max_sequences": 3}], ids=["all", "chunked", "few", "three"]
)
def test_tokens_with_graph_replay_equal_those_without_graphs(
    runner: Runner, expected: list[list[int]], options: dict[str, int], overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Bucket | None] = []
    run = runner.ops.run

    def spy(forward, batch, recorded):  # type: ignore[no-untyped-def]
        ran.append(batch.bucket)
        return run(lambda _: pytest.fail("not captured"), batch) if batch.bucket else run(forward, batch)

    monkeypatch.setattr(runner.ops, "run", spy)
    scheduler = scheduler_of(runner, **{"max_sequences": 6, "speculation": False, **options})  # type: ignore[arg-type]
    assert generate(runner, scheduler, PROMPTS, TOKENS, overlap=overlap) == expected
    assert any(ran)
    assert None in ran


def test_drafts_with_graphs_and_max_step_tokens_1_do_not_change_the_tokens(
    model: Path, expected: list[list[int]]
) -> None:
    runner = graph_runner(model, max_sequences=4, max_step_tokens=1)
    runner.warm_up()
    scheduler = scheduler_of(runner, max_sequences=4, max_step_tokens=1)
    assert generate(runner, scheduler, PROMPTS[:2], TOKENS) == expected[:2]


def test_padding_rows_of_a_graph_do_not_change_seeded_tokens(runner: Runner) -> None:
    seeded = SamplingParams(temperature=0.7, top_p=0.9, seed=7)
    (expected,) = generate(runner, scheduler_of(runner, max_sequences=6), PROMPTS[1:2], TOKENS, seeded)
    together = generate(runner, scheduler_of(runner, max_sequences=6), PROMPTS[1:2] * 5, TOKENS, seeded, overlap=True)
    assert together == [expected] * 5


def test_steps_with_drafts_are_replayed_from_graphs(
    runner: Runner, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_once(model, EngineOptions(dtype="float32", kv_cache_mb=4))
    prompts = [PROMPTS[2] * 2, PROMPTS[1]]
    expected = generate(plain, scheduler_of(plain, speculation=False), prompts, 40)
    ran: list[Bucket | None] = []
    run = runner.ops.run

    def spy(forward, batch, recorded):  # type: ignore[no-untyped-def]
        ran.append(batch.bucket)
        return run(forward, batch)

    monkeypatch.setattr(runner.ops, "run", spy)
    for overlap in (False, True):
        assert generate(runner, scheduler_of(runner, max_sequences=6), prompts, 40, overlap=overlap) == expected
    assert {Bucket(8, 4), Bucket(2, 2)} <= set(ran)


def test_padding_rows_of_a_captured_step_write_nothing_to_the_kv_cache(runner: Runner) -> None:
    original = [cache.clone() for cache in runner._caches]
    for bucket in runner.buckets:
        runner.ops.run(runner._forward, runner._buffers.load(StepInput.blank(bucket)))
        for cache, old in zip(runner._caches, original, strict=True):
            assert torch.equal(cache, old)


def plan_of(chance: random.Random, decoding: bool) -> list[PlanEntry]:
    """Return a plan of random sequences: some have drafts, some are inside their prompts."""
    plan: list[PlanEntry] = []
    for number in range(chance.randrange(1, 7)):
        length = chance.choice((1, 2, 63, 64, 65, 100, 129, 200))
        request = Generate(id=number, prompt=[chance.randrange(500) for _ in range(length)], max_tokens=9, sampling=S)
        count = 1 if decoding or chance.random() < 0.5 else chance.randrange(1, length + 1)
        pages = [chance.randrange(900) for _ in range(length // PAGE_SIZE + 1)]
        sequence = Sequence(request, computed=length - count, pages=pages, slot=number)
        short = not decoding and count > 1 and chance.random() < 0.5
        drafts = () if decoding or short or length % PAGE_SIZE > 40 else (7, 8, 9)[: chance.randrange(4)]
        plan.append(PlanEntry(sequence, count - short, drafts))
    return plan


S = SamplingParams(temperature=0)


@pytest.mark.parametrize("seed", range(20))
def test_step_buffers_packed_into_one_tensor_hold_the_same_values_as_separate_ones(seed: int) -> None:
    chance = random.Random(seed)
    capacity = Capacity(rows=2000, sequences=8, pages_per_sequence=5)
    packed, plain = StepBuffers(capacity, CPU, packed=True), StepBuffers(capacity, CPU, packed=False)
    for _ in range(4):
        plan = plan_of(chance, decoding=chance.random() < 0.5)
        packed._hosts[0].fill_(-999)
        packed._hosts[1].fill_(-999)
        actual, expected = packed.load(build_step(plan, buckets(8, 4))), plain.load(build_step(plan))
        lengths = [span.stop - span.start for span in expected.span_list]
        bucket = actual.bucket
        if max(lengths) == 1:
            assert bucket == next(Bucket(n, n) for n in (1, 2, 4, 8) if n >= len(plan))
        elif len(plan) <= 4 and max(lengths) <= 17:
            assert bucket == next(Bucket(rows, 4) for rows in (8, 16, 32, 68) if rows >= sum(lengths))
        else:
            assert bucket is None
        size = bucket or Bucket(sum(lengths), len(plan))
        assert actual.samples == len(expected.sample_rows)
        for name in ("tokens", "positions", "slots", "sample_rows"):
            values, wanted = getattr(actual, name), getattr(expected, name)
            assert values[: len(wanted)].tolist() == wanted.tolist()
            assert len(values) == (size.rows if bucket else len(wanted))
            assert set(values[len(wanted) :].tolist()) <= {-1 if name == "slots" else 0}
        spans, wanted = actual.spans, expected.spans
        count = len(plan)
        assert actual.span_list == expected.span_list
        assert spans.starts.tolist()[: count + 1] == wanted.starts.tolist()
        assert set(spans.starts.tolist()[count:]) == {len(expected.tokens)}
        for name in ("prefixes", "settled", "state_slots"):
            assert getattr(spans, name)[:count].tolist() == getattr(wanted, name).tolist()
        for span, pages, wanted_pages in zip(
            expected.span_list, spans.pages.tolist(), wanted.pages.tolist(), strict=False
        ):
            used = -(-(span.prefix + span.stop - span.start) // PAGE_SIZE)
            assert pages[:used] == wanted_pages[:used]
        assert spans.pages.shape == (size.spans, 16)
        graph_shape = {True: (size.spans, 0), False: (0, 17)}[max(lengths) == 1]
        shape = (expected.singles, expected.most_rows) if bucket is None else graph_shape
        assert (actual.singles, actual.most_rows) == shape
        assert all(tensor.data_ptr() % 16 == 0 for tensor in (actual.tokens, actual.slots, spans.pages, spans.starts))


def test_graph_sizes_are_at_most_32_rows_apart_and_reach_the_maximum() -> None:
    assert buckets(1) == [(1, 1)]
    assert buckets(1, 4) == [(1, 1), (8, 1), (16, 1), (17, 1)]
    assert buckets(6, 9) == [(1, 1), (2, 2), (4, 4), (6, 6), (8, 4), (16, 4), (32, 4), (68, 4)]
    assert [bucket.rows for bucket in buckets(64)] == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    for most in (130, 200, 512):
        sizes = [bucket.rows for bucket in buckets(most)]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
        assert max(after - before for before, after in pairwise(sizes)) <= 32
