"""All ranks capture the same graphs, or no rank replays graphs. The GPU kernels run in Triton's interpreter."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from scheduler_runs import generate, scheduler_of

import triton_interpreter  # noqa: F401 - makes it faster
from debug_fault import Faults
from helexa.neuron.engine.execution.device_errors import DeviceError
from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import MemoryGrant
from helexa.neuron.engine.loading.loaded_model_and_measured_memory import LoadedModel
from helexa.neuron.ops.batch import Bucket
from injection import hooks, inject
from neuron.memory_requests import needs
from neuron.ranks.rank_models import loaded
from nightly import daily
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
OPTIONS: dict[str, Any] = {"kernels": "triton", "dtype": "float32", "max_sequences": 2, "speculation": False}
PROMPTS = [[(7 + 11 * i * i) % 96 for i in range(length)] for length in (2, 6)]
TOKENS = 3


@pytest.fixture(autouse=True)
def fast_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter faster in the processes of the other ranks, too."""
    for name, value in hooks().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_model(tmp_path, model_type="qwen3_moe", **SHAPE, **EXPERTS)
    return tmp_path


@contextmanager
def two_ranks(model: Path) -> Iterator[Runner]:
    with loaded(model, tensor_parallel=2, tensor_parallel_mode="sum", **OPTIONS) as runner:
        yield runner


def tokens_of(runner: Runner) -> list[list[int]]:
    return generate(runner, scheduler_of(runner, max_sequences=2, speculation=False), PROMPTS, TOKENS)


def tokens_of_one_rank(model: Path) -> list[list[int]]:
    with loaded(model, **OPTIONS | {"kernels": "torch"}) as runner:
        return tokens_of(runner)


def test_all_ranks_replay_graphs_of_the_same_size(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks(model) as runner:
        runner.warm_up()
        assert runner.buckets == [Bucket(1, 1), Bucket(2, 2)]
        ran: list[Bucket | None] = []
        run = runner.ops.run

        def spy(forward, batch, capture):  # type: ignore[no-untyped-def]
            ran.append(batch.bucket)
            return run(lambda _: pytest.fail("not captured"), batch) if batch.bucket else run(forward, batch)

        monkeypatch.setattr(runner.ops, "run", spy)
        assert tokens_of(runner) == tokens_of_one_rank(model)
        assert Bucket(2, 2) in ran


@pytest.mark.parametrize("refusing", daily([1], [0, 1]))
def test_graph_capture_refused_by_one_rank_disables_graphs_on_all_ranks(
    model: Path, refusing: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inject(monkeypatch, f"rank{refusing}/refuse@capture")
    with two_ranks(model) as runner:
        Faults.from_environment(model, os.environ).afflict(runner)  # as in the process of rank 0
        runner.warm_up()
        assert runner.buckets == []
        assert runner.ops._graphs._replays == {}  # type: ignore[attr-defined]
        where = "rank 1: " if refusing else ""
        assert f"and are slower error='{where}injected: operation not permitted" in caplog.text
        assert tokens_of(runner) == tokens_of_one_rank(model)


def test_device_error_of_a_rank_fails_the_graph_capture(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "rank1/fault@capture")
    with two_ranks(model) as runner, pytest.raises(DeviceError, match="rank 1: injected: device error"):
        runner.warm_up()


def test_tokens_of_two_ranks_are_unchanged_after_the_kv_cache_is_reallocated(model: Path) -> None:
    options = EngineOptions(tensor_parallel=2, **OPTIONS)
    with two_ranks(model) as runner:
        expected = tokens_of(runner)
        second = LoadedModel(runner._model, runner.ops, options, runner._others).runner(
            needs(context=128), MemoryGrant(total=0, pages=9, sequences=2, snapshots=0)
        )
        second.facts = runner.facts
        assert tokens_of(second) == expected
