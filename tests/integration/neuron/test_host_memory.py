"""Memory limits from control groups, at each level of the hierarchy."""

from pathlib import Path

import psutil
import pytest

from helexa.neuron.hardware.host_memory import host_memory

GIB = 1 << 30


def state(folder: Path, limit: int | str, used: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")


@pytest.mark.parametrize(
    ("service", "slice_", "total"), [(GIB, "max", GIB), ("max", GIB, GIB), (GIB, GIB // 2, GIB // 2)]
)
def test_smallest_limit_of_the_hierarchy_applies(
    service: int | str, slice_: int | str, total: int, tmp_path: Path
) -> None:
    state(tmp_path / "system.slice" / "node.service", service, GIB // 4)
    state(tmp_path / "system.slice", slice_, GIB // 4)
    assert host_memory(tmp_path, "system.slice/node.service") == (total - GIB // 4, total)


def test_without_a_limit_host_memory_is_reported(tmp_path: Path) -> None:
    state(tmp_path / "a", "max", 5)
    assert host_memory(tmp_path, "a")[1] == psutil.virtual_memory().total
    assert host_memory(tmp_path, "gone")[1] == psutil.virtual_memory().total
