"""The number of ranks that a node reports and accepts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from helexa.core.errors import HelexaError, TensorParallelError
from helexa.core.node_reports import Discovery
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.lifecycle import load_preparation
from helexa.neuron.lifecycle.load_preparation import check_heads, devices_of_ranks, max_tensor_parallel

CPUS = frozenset(range(16))


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_preparation, "usable_cpus", lambda: CPUS)


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
def test_max_tensor_parallel_of_a_cpu_node_is_its_numa_nodes_or_configured_ranks(
    numa_nodes: int, configured: int, reported: int
) -> None:
    assert max_tensor_parallel("cpu", configured, facts(numa_nodes=numa_nodes)) == reported


A, B, A_OLD = ("A", "9.0"), ("B", "9.0"), ("A", "8.0")


@pytest.mark.parametrize(
    ("gpus", "reported"), [([], 1), ([A], 1), ([A, A], 2), ([A, B], 1), ([A, B, B, B], 3), ([A, A_OLD], 1)]
)
def test_max_tensor_parallel_of_a_gpu_node_is_its_largest_group_of_equal_devices(
    gpus: list[tuple[str, str]], reported: int
) -> None:
    assert max_tensor_parallel("cuda:0", 4, facts(*gpus, numa_nodes=2)) == reported


def test_max_tensor_parallel_of_an_apple_gpu_is_1() -> None:
    assert max_tensor_parallel("mps", 4, facts(numa_nodes=2)) == 1


NODE = facts(A, A, A, B).devices


def devices_of(ranks: int, requested: Sequence[int] = (), device: str = "cuda:1") -> list[str]:
    return devices_of_ranks(EngineOptions(device=device, tensor_parallel=ranks), requested, NODE)


def test_ranks_run_on_the_first_equal_devices_or_on_the_requested_ones() -> None:
    assert devices_of(2) == ["cuda:0", "cuda:1"]
    assert devices_of(2, [2, 0]) == ["cuda:2", "cuda:0"]
    assert devices_of(3) == ["cuda:0", "cuda:1", "cuda:2"]
    options = EngineOptions(device="cuda:0", tensor_parallel=2)
    assert devices_of_ranks(options, (), facts(B, A, A).devices) == ["cuda:1", "cuda:2"]


def test_single_rank_and_ranks_on_cpus_run_on_the_configured_device() -> None:
    assert devices_of(1) == devices_of(1, [3]) == []
    assert devices_of_ranks(EngineOptions(tensor_parallel=16), [0], []) == []


@pytest.mark.parametrize(
    ("ranks", "requested", "device", "reason", "most"),
    [
        (5, [], "cuda:0", "the devices differ: 3 x A, 1 x B", 3),
        (2, [0, 3], "cuda:0", "the devices differ: 1 x A, 1 x B", 1),
        (2, [], "mps", "ranks run only on CPUs and CUDA devices", 1),
        (17, [], "cpu", "this node can run at most 16 ranks on its CPUs", 16),
    ],
)
def test_number_of_ranks_that_the_node_cannot_run_is_rejected(
    ranks: int, requested: list[int], device: str, reason: str, most: int
) -> None:
    with pytest.raises(TensorParallelError) as rejected:
        devices_of(ranks, requested, device)
    assert str(rejected.value) == f"tensor_parallel is {ranks}, but {reason}; set it to at most {most}"
    assert rejected.value.details == {
        "tp_size": ranks,
        "max_tensor_parallel": most,
        "suggestion": f"set tensor_parallel to at most {most}",
    }


def test_more_ranks_than_usable_devices_are_rejected() -> None:
    with pytest.raises(TensorParallelError, match="the number of usable devices is 2"):
        devices_of_ranks(EngineOptions(device="cuda:0", tensor_parallel=3), (), facts(A, A).devices)


@pytest.mark.parametrize(
    ("ranks", "requested", "problem"),
    [
        (0, [], "tensor_parallel is 0; set it to 1, or to the number of devices to use"),
        (1, [0, 1], "the request names 2 devices, but tensor_parallel is 1; name 1 devices or none"),
        (2, [0], "the request names 1 devices, but tensor_parallel is 2; name 2 devices or none"),
        (2, [0, 7], r"this node has no device cuda:7; its devices are \[.*\]"),
        (2, [1, 1], "the request names device 1 twice; name each device once"),
    ],
)
def test_contradictory_number_of_ranks_and_devices_is_an_error(ranks: int, requested: list[int], problem: str) -> None:
    with pytest.raises(HelexaError, match=f"^{problem}$"):
        devices_of(ranks, requested)


@pytest.mark.parametrize(
    "config", [{"num_attention_heads": 3}, {"text_config": {"num_attention_heads": 3}, "num_attention_heads": 8}]
)
def test_model_with_fewer_attention_heads_than_ranks_is_rejected(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_heads(tmp_path, 3)
    with pytest.raises(TensorParallelError, match=f"tensor_parallel is 4, but {tmp_path.name} has 3 attention heads"):
        check_heads(tmp_path, 4)


def test_gguf_file_with_fewer_attention_heads_than_ranks_is_rejected(smollm2_gguf: Path) -> None:
    check_heads(smollm2_gguf, 9)
    with pytest.raises(TensorParallelError) as refused:
        check_heads(smollm2_gguf, 10)
    assert refused.value.details == {
        "tp_size": 10,
        "max_tensor_parallel": 9,
        "suggestion": "set tensor_parallel to at most 9",
        "heads": 9,
    }


def test_model_with_an_unknown_number_of_heads_is_not_rejected_by_the_server(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": "many"}')
    check_heads(tmp_path, 64)
    check_heads(tmp_path / "nowhere", 1)
