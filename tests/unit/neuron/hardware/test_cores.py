"""CPU lists, and physical cores with several hardware threads."""

from pathlib import Path

import pytest

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ranks import cpu_binding
from helexa.neuron.hardware.cpus import cores, cpu_limit, cpu_list, parse_cpu_list, physical_cores, usable_cpus


def topology(folder: Path, siblings: dict[int, str], name: str = "core_cpus_list") -> Path:
    for cpu, listed in siblings.items():
        (folder / f"cpu{cpu}/topology").mkdir(parents=True)
        (folder / f"cpu{cpu}/topology" / name).write_text(f"{listed}\n")
    return folder


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_hardware_threads_of_a_core_are_grouped(tmp_path: Path, name: str) -> None:
    folder = topology(tmp_path, {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}, name)
    assert cores({0, 1, 4, 5}, folder) == [(0, 4), (1, 5)]
    assert cores({0, 5}, folder) == [(0,), (5,)]


def test_cpu_without_topology_files_counts_as_a_core(tmp_path: Path) -> None:
    assert cores({0, 1, 2}, topology(tmp_path, {0: "0-1", 1: "0-1"})) == [(0, 1), (2,)]


def test_between_one_and_all_usable_cpus_are_detected_as_physical_cores() -> None:
    assert 1 <= physical_cores() <= len(usable_cpus())
    assert physical_cores([next(iter(usable_cpus()))]) == 1


@pytest.mark.parametrize("text", ["", "0", "0-3", "0,2,4", "0-3,8-11,15"])
def test_linux_cpu_list_is_parsed_and_written(text: str) -> None:
    assert cpu_list(parse_cpu_list(text)) == text


def test_invalid_parts_of_a_linux_cpu_list_are_ignored() -> None:
    assert parse_cpu_list("x,1, 3-2,-5,7-8,9-,99999999") == {1, 7, 8, 9}
    assert len(parse_cpu_list("0-99999999999")) == 65536


def control_groups(folder: Path, limits: dict[str, str], own: str) -> tuple[Path, Path]:
    """Write files with limits, and a file like `/proc/self/cgroup`; return the folder and the file."""
    for name, limit in limits.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{limit}\n")
    (folder / "own").write_text(own)
    return folder, folder / "own"


@pytest.mark.parametrize(
    ("limits", "own", "expected"),
    [
        ({"a/b/cpu.max": "50000 100000"}, "0::/a/b\n", 0.5),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, "0::/a/b\n", 2.5),
        ({"a/b/cpu.max": "max 100000", "other/cpu.max": "10000 100000"}, "0::/a/b\n", None),
        ({"cpu.max": "10000 20000"}, "0::/outside/of/the/container\n", 0.5),
        ({"cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/a\n0::/\n", 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/\n2:memory:/a:b\n", None),
        ({}, "", None),
    ],
)
def test_lowest_cpu_time_limit_of_the_control_groups_of_the_process_applies(
    tmp_path: Path, limits: dict[str, str], own: str, expected: float | None
) -> None:
    assert cpu_limit(*control_groups(tmp_path, limits, own)) == expected


@pytest.mark.parametrize(
    ("limit", "ranks", "threads"), [(None, 1, 64), (0.5, 1, 1), (2.0, 1, 2), (2.5, 1, 3), (2.5, 2, 2), (100.0, 4, 16)]
)
def test_default_number_of_threads_fits_the_cpu_time_limit(
    monkeypatch: pytest.MonkeyPatch, limit: float | None, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(cpu_binding, "physical_cores", lambda cpus=None: 64)
    monkeypatch.setattr(cpu_binding, "cpu_limit", lambda: limit)
    assert cpu_binding.threads_of_rank(EngineOptions(tensor_parallel=ranks), 0) == threads
    assert cpu_binding.threads_of_rank(EngineOptions(tensor_parallel=ranks, threads=7), 0) == 7
