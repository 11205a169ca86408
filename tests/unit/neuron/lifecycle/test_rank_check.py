"""The number of ranks that a node reports and accepts."""

import json
from pathlib import Path
from typing import Any

import pytest

from helexa.core.errors import HelexaError, TensorParallelError
from helexa.core.fleet import Discovery
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.lifecycle import rank_check
from helexa.neuron.lifecycle.rank_check import check_heads, check_ranks, max_tensor_parallel

CPUS = frozenset(range(16))


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_check, "usable_cpus", lambda: CPUS)


def facts(*gpus: tuple[str, str], numa_nodes: int = 1) -> Discovery:
    devices = [
        {"index": index, "name": name, "vram_total_mb": 24000, "compute_capability": capability}
        for index, (name, capability) in enumerate(gpus)
    ]
    nodes = [{"node": number, "cpus": 16 // numa_nodes} for number in range(numa_nodes)] if numa_nodes > 1 else None
    return Discovery.model_validate({"hostname": "h", "os": "Linux", "devices": devices, "numa_nodes": nodes})


@pytest.mark.parametrize(
    ("numa_nodes", "configured", "reported"), [(1, 1, 1), (2, 1, 2), (4, 2, 4), (1, 2, 2), (2, 3, 3), (1, 32, 16)]
)
def test_cpu_node_reports_numa_nodes_or_configured_ranks(numa_nodes: int, configured: int, reported: int) -> None:
    assert max_tensor_parallel("cpu", configured, facts(numa_nodes=numa_nodes)) == reported


A, B, A_OLD = ("A", "9.0"), ("B", "9.0"), ("A", "8.0")


@pytest.mark.parametrize(
    ("gpus", "reported"), [([], 1), ([A], 1), ([A, A], 2), ([A, B], 1), ([A, B, B, B], 3), ([A, A_OLD], 1)]
)
def test_gpu_node_reports_the_largest_group_of_devices_that_are_alike(
    monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[str, str]], reported: int
) -> None:
    assert max_tensor_parallel("cuda:0", 4, facts(*gpus, numa_nodes=2)) == 1, "the engine has no ranks on GPUs yet"
    monkeypatch.setattr(rank_check, "CUDA_RANKS", True)
    assert max_tensor_parallel("cuda:0", 4, facts(*gpus, numa_nodes=2)) == reported


def test_apple_gpu_is_not_divided() -> None:
    assert max_tensor_parallel("mps", 4, facts(numa_nodes=2)) == 1


def refusal(ranks: int, device: str = "cpu", devices: tuple[int, ...] = ()) -> TensorParallelError:
    with pytest.raises(TensorParallelError) as refused:
        check_ranks(EngineOptions(device=device, tensor_parallel=ranks), devices)
    return refused.value


def test_more_ranks_than_cpus_are_refused_with_the_largest_number() -> None:
    check_ranks(EngineOptions(tensor_parallel=16), ())
    error = refusal(17)
    assert str(error) == "tensor_parallel is 17, but this node can run at most 16 ranks on its CPUs"
    assert error.details == {
        "tp_size": 17,
        "max_tensor_parallel": 16,
        "suggestion": "set tensor_parallel to at most 16",
    }


@pytest.mark.parametrize("device", ["cuda:0", "mps"])
def test_ranks_on_gpus_are_refused(device: str) -> None:
    check_ranks(EngineOptions(device=device), (0,))
    error = refusal(2, device)
    assert str(error).endswith("this node can divide models only among CPU processes, not among GPUs")
    assert error.details["max_tensor_parallel"] == 1


@pytest.mark.parametrize(
    ("ranks", "devices", "reason", "most"),
    [
        (4, (), "the devices differ: 1 x A, 3 x B", 3),
        (2, (0, 1), "the devices differ: 1 x A, 1 x B", 1),
        (3, (1, 2), "the number of usable devices is 2", 2),
        (2, (8, 9), "the number of usable devices is 0", 1),
    ],
)
def test_devices_that_differ_or_are_missing_are_refused(
    monkeypatch: pytest.MonkeyPatch, ranks: int, devices: tuple[int, ...], reason: str, most: int
) -> None:
    monkeypatch.setattr(rank_check, "CUDA_RANKS", True)
    monkeypatch.setattr(rank_check, "discover", lambda: facts(A, B, B, B))
    check_ranks(EngineOptions(device="cuda:1", tensor_parallel=3), (1, 2, 3))
    error = refusal(ranks, "cuda:0", devices)
    assert str(error) == f"tensor_parallel is {ranks}, but {reason}"
    assert error.details["max_tensor_parallel"] == most


@pytest.mark.parametrize(
    ("ranks", "devices", "reason"),
    [(0, (), "tensor_parallel is 0"), (1, (0, 1), "the request names 2 devices, but tensor_parallel is 1")],
)
def test_contradictory_request_is_an_error(ranks: int, devices: tuple[int, ...], reason: str) -> None:
    with pytest.raises(HelexaError, match=reason):
        check_ranks(EngineOptions(tensor_parallel=ranks), devices)


@pytest.mark.parametrize(
    "config", [{"num_attention_heads": 3}, {"text_config": {"num_attention_heads": 3}, "num_attention_heads": 8}]
)
def test_model_with_fewer_heads_than_ranks_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_heads(tmp_path, 3)
    with pytest.raises(TensorParallelError, match=f"tensor_parallel is 4, but {tmp_path.name} has 3 attention heads"):
        check_heads(tmp_path, 4)


def test_gguf_file_with_fewer_heads_than_ranks_is_refused(smollm2_gguf: Path) -> None:
    check_heads(smollm2_gguf, 9)
    with pytest.raises(TensorParallelError) as refused:
        check_heads(smollm2_gguf, 10)
    assert refused.value.details == {
        "tp_size": 10,
        "max_tensor_parallel": 9,
        "suggestion": "set tensor_parallel to at most 9",
        "heads": 9,
    }


def test_unknown_number_of_heads_is_left_to_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": "many"}')
    check_heads(tmp_path, 64)
    check_heads(tmp_path / "nowhere", 1)
