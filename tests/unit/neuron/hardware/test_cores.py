"""CPU lists, and physical cores with several hardware threads."""

from pathlib import Path

import pytest

from helexa.neuron.hardware.cores import cores, cpu_list, parse_cpu_list, physical_cores, usable_cpus


def topology(folder: Path, siblings: dict[int, str], name: str = "core_cpus_list") -> Path:
    for cpu, listed in siblings.items():
        (folder / f"cpu{cpu}/topology").mkdir(parents=True)
        (folder / f"cpu{cpu}/topology" / name).write_text(f"{listed}\n")
    return folder


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_hardware_threads_of_a_core_are_a_group(tmp_path: Path, name: str) -> None:
    folder = topology(tmp_path, {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"}, name)
    assert cores({0, 1, 4, 5}, folder) == [(0, 4), (1, 5)]
    assert cores({0, 5}, folder) == [(0,), (5,)]


def test_cpu_without_files_is_a_core(tmp_path: Path) -> None:
    assert cores({0, 1, 2}, topology(tmp_path, {0: "0-1", 1: "0-1"})) == [(0, 1), (2,)]


def test_this_process_has_at_least_one_core() -> None:
    assert 1 <= physical_cores() <= len(usable_cpus())
    assert physical_cores([next(iter(usable_cpus()))]) == 1


@pytest.mark.parametrize("text", ["", "0", "0-3", "0,2,4", "0-3,8-11,15"])
def test_cpu_list_is_parsed_and_written(text: str) -> None:
    assert cpu_list(parse_cpu_list(text)) == text


def test_invalid_parts_of_a_cpu_list_are_ignored() -> None:
    assert parse_cpu_list("x,1, 3-2,-5,7-8,9-,99999999") == {1, 7, 8, 9}
    assert len(parse_cpu_list("0-99999999999")) == 65536
