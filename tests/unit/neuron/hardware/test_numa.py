"""NUMA nodes, and the division of their CPUs among ranks."""

from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ranks.cpu_binding import RANK_CPUS, cpus_for, divide
from helexa.neuron.hardware.cpus import CpuNode, numa_nodes
from numa_folder import numa_folder

ALL = range(64)


def nodes(*cpus: tuple[int, ...]) -> list[CpuNode]:
    return [CpuNode(number, own, 0, {}) for number, own in enumerate(cpus)]


def test_cpus_memory_and_distances_of_numa_nodes_are_read(tmp_path: Path) -> None:
    first, second = numa_nodes(ALL, numa_folder(tmp_path, {0: "0-1,4-5", 1: "2-3"}))
    assert first == CpuNode(0, (0, 1, 4, 5), 4096, {0: 10, 1: 21})
    assert (second.number, second.cpus, second.distances) == (1, (2, 3), {0: 21, 1: 10})


def test_numa_nodes_list_only_cpus_that_the_process_may_use(tmp_path: Path) -> None:
    folder = numa_folder(tmp_path, {0: "0-3", 1: "4-7", 10: "8-11"})
    assert [(node.number, node.cpus) for node in numa_nodes({2, 3, 8}, folder)] == [(0, (2, 3)), (10, (8,))]


def test_numa_node_without_cpus_is_left_out(tmp_path: Path) -> None:
    folder = numa_folder(tmp_path, {0: "0-3", 1: "", 2: "4-7"})
    assert [(node.number, node.distances[2]) for node in numa_nodes(ALL, folder)] == [(0, 21), (2, 10)]


@pytest.mark.parametrize("missing", ["meminfo", "distance"])
def test_missing_file_of_a_numa_node_leaves_its_memory_or_distances_unknown(tmp_path: Path, missing: str) -> None:
    folder = numa_folder(tmp_path, {0: "0-3"})
    (folder / "node0" / missing).unlink()
    expected = CpuNode(0, (0, 1, 2, 3), 0 if missing == "meminfo" else 4096, {} if missing == "distance" else {0: 10})
    assert numa_nodes(ALL, folder) == [expected]


def test_machine_without_numa_files_has_no_numa_nodes(tmp_path: Path) -> None:
    assert numa_nodes(ALL, tmp_path / "nowhere") == []
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0/cpulist").write_text("?\n")
    assert numa_nodes(ALL, tmp_path) == []


def test_environment_variable_selects_the_folder_from_which_numa_nodes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURON_DEBUG_NUMA", str(numa_folder(tmp_path, {5: "0-63"})))
    assert [node.number for node in numa_nodes(ALL)] == [5]


FOUR = nodes((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (3, [(0, 1), (2, 3), (4, 5, 6, 7)]),
        (4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (8, [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
    ],
)
def test_ranks_get_adjacent_numa_nodes_or_share_a_numa_node(ranks: int, expected: list[tuple[int, ...]]) -> None:
    assert [divide(FOUR, rank, ranks) for rank in range(ranks)] == expected


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        ("4-11", [(4, 5, 6, 7), (8, 9, 10, 11)]),
        ("2-9", [(), ()]),  # a container with six CPUs of one node and two of the other
    ],
)
def test_ranks_are_not_bound_to_numa_nodes_with_very_unequal_cpu_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, usable: str, expected: list[tuple[int, ...]]
) -> None:
    monkeypatch.setenv("NEURON_DEBUG_NUMA", str(numa_folder(tmp_path, {0: "0-7", 1: "8-15"})))
    monkeypatch.setenv(RANK_CPUS, usable)
    options = EngineOptions(device="cpu", tensor_parallel=2)
    assert [cpus_for(options, rank) for rank in range(2)] == expected


def test_cpus_of_a_single_numa_node_are_not_divided_among_ranks() -> None:
    assert divide(nodes((0, 1, 2, 3)), 0, 2) == ()
    assert divide([], 1, 2) == ()


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.integers(1, 12))
def test_every_rank_gets_cpus_and_every_cpu_gets_a_rank(sizes: list[int], ranks: int) -> None:
    numbers = iter(range(1000, 2000))  # this machine has no such CPUs, so each CPU is a core
    machine = nodes(*(tuple(next(numbers) for _ in range(size)) for size in sizes))
    parts = [divide(machine, rank, ranks) for rank in range(ranks)]
    assert all(parts)
    assert set(chain(*parts)) == {cpu for node in machine for cpu in node.cpus}
    if ranks <= len(machine):
        assert len(set(chain(*parts))) == sum(map(len, parts))
