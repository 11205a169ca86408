"""Memory limits from control groups, at each level of the hierarchy."""

from pathlib import Path

import psutil
import pytest

from helexa.neuron.hardware.host_memory import host_memory, memory_id

GIB = 1 << 30


def state(folder: Path, limit: int | str, used: int, names: tuple[str, str] = ("memory.max", "memory.current")) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")


def own(folder: Path, group: str, controllers: str = "") -> Path:
    """Write a file like `/proc/self/cgroup` for a process in `group`, and return its path."""
    (folder / "own").write_text(f"4:freezer:/x\n0:{controllers}:/{group}\n")
    return folder / "own"


@pytest.mark.parametrize(
    ("service", "slice_", "total"), [(GIB, "max", GIB), ("max", GIB, GIB), (GIB, GIB // 2, GIB // 2)]
)
def test_lowest_free_memory_of_a_control_group_and_its_parents_is_reported(
    service: int | str, slice_: int | str, total: int, tmp_path: Path
) -> None:
    state(tmp_path / "system.slice" / "node.service", service, GIB // 4)
    state(tmp_path / "system.slice", slice_, GIB // 4)
    assert host_memory(tmp_path, own(tmp_path, "system.slice/node.service")) == (total - GIB // 4, total)


def test_memory_high_of_a_control_group_counts_as_a_limit(tmp_path: Path) -> None:
    state(tmp_path / "a", 2 * GIB, GIB // 4)
    (tmp_path / "a" / "memory.high").write_text(f"{GIB}\n")
    assert host_memory(tmp_path, own(tmp_path, "a")) == (GIB - GIB // 4, GIB)


def test_memory_limits_of_control_groups_version_1_apply(tmp_path: Path) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    state(tmp_path / "memory" / "a" / "b", 9223372036854771712, GIB // 2, names)  # no limit
    state(tmp_path / "memory" / "a", GIB, GIB // 2, names)
    files = "inactive_file 5\nactive_file 5\ntotal_inactive_file 1000\ntotal_active_file 24\n"
    (tmp_path / "memory" / "a" / "memory.stat").write_text(files)
    assert host_memory(tmp_path, own(tmp_path, "a/b", "cpuset,memory")) == (GIB // 2 + 1024, GIB)


def test_file_cache_of_a_control_group_counts_as_free_memory(tmp_path: Path) -> None:
    state(tmp_path / "a", GIB, GIB // 2)
    (tmp_path / "a" / "memory.stat").write_text("anon 7\ninactive_file 1000\nactive_file 20\nslab_reclaimable 4\n")
    assert host_memory(tmp_path, own(tmp_path, "a")) == (GIB // 2 + 1024, GIB)


def test_without_a_control_group_limit_the_memory_of_the_host_is_reported(tmp_path: Path) -> None:
    state(tmp_path / "a", "max", 5)
    assert host_memory(tmp_path, own(tmp_path, "a"))[1] == psutil.virtual_memory().total
    assert host_memory(tmp_path, own(tmp_path, "gone"))[1] == psutil.virtual_memory().total


def test_processes_under_one_memory_limit_have_the_same_memory_id(tmp_path: Path) -> None:
    for group, limit in (("a", GIB), ("a/child", "max"), ("b", GIB), ("free", "max")):
        state(tmp_path / group, limit, 0)
    ids = {group: memory_id(tmp_path, own(tmp_path, group)) for group in ("a", "a/child", "b", "free", "gone")}
    assert None not in ids.values()
    assert ids["a"] == ids["a/child"] != ids["b"]
    assert ids["free"] == ids["gone"] not in (ids["a"], ids["b"])
