"""Files of saved pages: limits, order of deletion, errors of the disk."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helexa.neuron.cache_folder import PROMPTS_FOLDER, saved_prompts
from helexa.neuron.engine import prefix_disk
from helexa.neuron.engine.prefix_disk import PAGE, PrefixDisk

Open = Callable[..., PrefixDisk]
AMPLE = 1 << 30


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Open a namespace with a size limit for all namespaces."""
    disks: list[PrefixDisk] = []

    def open_namespace(name: str, limit_bytes: int = AMPLE) -> PrefixDisk:
        disks.append(PrefixDisk(tmp_path / name, limit_bytes))
        return disks[-1]

    yield open_namespace
    for namespace in disks:
        namespace.close()


def key(number: int) -> bytes:
    return PAGE + number.to_bytes(16, "big")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_disk, "_SEGMENT_BYTES", 4096)


def age(segment: Path, days: float) -> None:
    """Let a segment look as if it was last used some days earlier."""
    used = segment.stat().st_mtime - days * 86400
    os.utime(segment, (used, used))


def size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.segment"))


def test_prompts_of_a_model_whose_file_name_is_not_utf8_are_saved(tmp_path: Path) -> None:
    disk = PrefixDisk(tmp_path / "a", AMPLE, "caf\udce9.gguf")
    disk.write(key(1), [b"one"])
    assert disk.read(key(1)) == b"one"
    disk.close()


def test_saved_prompts_list_every_model_id_under_which_they_were_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path))
    folder = tmp_path / PROMPTS_FOLDER / "a"
    for name in ("org/small", "small", "org/small"):
        disk = PrefixDisk(folder, AMPLE, name)
        disk.write(key(1), [b"one"])  # the second and third disk have this record
        disk.close()
    assert [entry.models for entry in saved_prompts()] == [("org/small", "small")]
    (folder / "model").unlink()
    assert [entry.models for entry in saved_prompts()] == [("unknown",)]


def test_records_written_by_one_process_are_read_by_a_second(tmp_path: Path, opened: Open) -> None:
    first = opened("a")
    first.write(key(1), [b"one", memoryview(b"more")])
    first.write(key(2), [b"two"])
    second = opened("a")
    assert second.read(key(1)) == first.read(key(1)) == b"onemore"
    assert second.read(key(2)) == b"two"
    assert second.read(key(3)) is None
    (segment,) = (tmp_path / "a").glob("*.segment")
    assert segment.stat().st_mode & 0o077 == 0 and (tmp_path / "a").stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("small")
def test_size_limit_deletes_the_least_recently_used_segment_of_all_models(tmp_path: Path, opened: Open) -> None:
    other = opened("other")
    other.write(key(0), [bytes(3000)])
    old, used = opened("old", 15 << 10), opened("used")
    used.write(key(1), [bytes(3000)])
    for days, name in ((3, "used"), (2, "other")):
        for segment in (tmp_path / name).glob("*.segment"):
            age(segment, days)
    assert used.read(key(1))  # which makes it the most recently used one
    for number in range(2, 5):
        old.write(key(number), [bytes(3000)])
        assert size(tmp_path) <= 15 << 10
    assert other.read(key(0)) is None and not (tmp_path / "other").exists()
    assert used.read(key(1)) == bytes(3000)


@pytest.mark.usefixtures("small")
def test_total_size_stays_within_the_limit_while_many_pages_are_written(tmp_path: Path, opened: Open) -> None:
    store = opened("a", 20 << 10)
    for number in range(100):
        store.write(key(number), [bytes([number]) * 1500])
        assert size(tmp_path) <= 20 << 10
    assert store.read(key(99)) == bytes([99]) * 1500
    assert store.read(key(0)) is None
    assert all(known in store for known in opened("a")._index)


def test_size_limit_too_small_for_a_page_disables_writes_with_one_warning(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened("a", 1)
    for number in range(3):
        store.write(key(number), [b"x"])
    assert not store.writes and store.read(key(0)) is None
    assert len(caplog.records) == 1 and "prefix_disk_mb" in caplog.text


def test_segments_older_than_30_days_are_deleted(tmp_path: Path, opened: Open) -> None:
    store = opened("a")
    store.write(key(0), [b"x"])
    (segment,) = (tmp_path / "a").glob("*.segment")
    age(segment, 31)
    opened("b").write(key(1), [b"y"])
    assert not segment.exists()


def test_saved_prompt_namespace_works_after_its_expired_segments_were_deleted(tmp_path: Path, opened: Open) -> None:
    opened("a").write(key(0), [b"x"])
    (old,) = (tmp_path / "a").glob("*.segment")
    os.utime(old, (1, 1))
    store = opened("a")
    store.write(key(1), [b"y"])
    assert not old.exists() and store.writes and opened("a").read(key(1)) == b"y"


@pytest.mark.parametrize("owner", [True, False])
def test_folder_that_another_user_owns_or_can_write_is_rejected(tmp_path: Path, opened: Open, owner: bool) -> None:
    opened("a").write(key(0), [b"x"])
    if owner and os.geteuid():
        pytest.skip("only root can give a folder to another user")
    if owner:
        os.chown(tmp_path / "a", 12345, 12345)
    else:
        (tmp_path / "a").chmod(0o770)
    with pytest.raises(PermissionError, match="another user"):
        opened("a")


def test_segment_file_of_another_format_version_is_not_read(tmp_path: Path, opened: Open) -> None:
    opened("a").write(key(0), [b"x"])
    (segment,) = (tmp_path / "a").glob("*.segment")
    segment.write_bytes(segment.read_bytes().replace(prefix_disk._MAGIC, b"hxp0"))
    store = opened("a")
    assert store.read(key(0)) is None
    store.write(key(0), [b"y"])
    assert opened("a").read(key(0)) == b"y"


def test_old_segment_without_a_complete_record_is_deleted(tmp_path: Path, opened: Open) -> None:
    """The engine was killed while it wrote the first record, so nothing in the segment is ever read."""
    opened("a").write(key(0), [b"x" * 100])
    (whole,) = (tmp_path / "a").glob("*.segment")
    old, new = whole.with_name("1-1.segment"), whole.with_name("2-2.segment")
    old.write_bytes(whole.read_bytes()[:-1])
    new.write_bytes(b"")
    os.utime(old, (1, 1))
    assert opened("a").read(key(0)) == b"x" * 100
    assert sorted((tmp_path / "a").glob("*.segment")) == [whole, new]


def test_record_read_after_a_bit_flip_in_its_segment_is_unchanged_or_missing(
    tmp_path: Path, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    contents = {key(number): bytes([number]) * 40 for number in range(3)}
    writer = opened("a")
    for name, page in contents.items():
        writer.write(name, [page])
    writer.close()
    (segment,) = (tmp_path / "a").glob("*.segment")
    original = segment.read_bytes()
    misses = 0
    for offset in range(len(original)):
        damaged = bytearray(original)
        damaged[offset] ^= 1 << offset % 8
        segment.write_bytes(damaged)
        caplog.clear()
        store = opened("a")
        found = {name: store.read(name) for name in contents}
        assert all(page in (contents[name], None) for name, page in found.items()), offset
        assert len(caplog.records) <= 1
        misses += None in found.values()
    padding = 3 * 15
    assert misses == len(original) - padding


def test_damaged_records_of_a_segment_can_be_written_again(tmp_path: Path, opened: Open) -> None:
    contents = {key(number): bytes([number]) * 40 for number in range(4)}
    writer = opened("a")
    for name, page in contents.items():
        writer.write(name, [page])
    writer.close()
    (segment,) = (tmp_path / "a").glob("*.segment")
    damaged = bytearray(segment.read_bytes())
    record = len(damaged) // 4
    for number in (1, 2):
        damaged[number * record + record // 2 + 10] ^= 1
    segment.write_bytes(damaged)
    store = opened("a")
    assert store.read(key(1)) is None
    for name, page in contents.items():  # an engine has computed the pages from the damaged one on
        store.write(name, [page])
    store.close()
    again = opened("a")
    assert {name: again.read(name) for name in contents} == contents


@pytest.mark.usefixtures("small")
def test_saved_prompt_store_recreates_a_folder_that_is_deleted_during_use(tmp_path: Path, opened: Open) -> None:
    store = opened("a")
    store.write(key(0), [bytes(3000)])
    shutil.rmtree(tmp_path / "a")
    assert store.read(key(0)) is None
    for number in (1, 2, 3):
        store.write(key(number), [bytes([number]) * 500])
        assert store.read(key(number)) == bytes([number]) * 500
    assert store.writes and opened("a").read(key(3)) == bytes([3]) * 500


@pytest.mark.usefixtures("small")
def test_all_records_of_a_deleted_segment_file_are_forgotten(tmp_path: Path, opened: Open) -> None:
    store = opened("a")
    for number in range(3):
        store.write(key(number), [bytes(100)])
    for segment in (tmp_path / "a").glob("*.segment"):
        segment.unlink()
    assert store.read(key(0)) is None
    assert key(1) not in store and store.size == 0
    store.write(key(1), [b"again"])
    assert opened("a").read(key(1)) == b"again"


def test_removed_record_is_not_found_after_a_restart(opened: Open) -> None:
    store = opened("a")
    store.write(key(0), [b"x"])
    store.write(key(1), [b"y"])
    store.remove(key(0))
    store.remove(key(2))  # unknown
    again = opened("a")
    assert again.read(key(0)) is None and again.read(key(1)) == b"y" and again.size == store.size == 1
    again.write(key(0), [b"z"])
    assert opened("a").read(key(0)) == b"z"


def test_removed_record_stays_removed_if_the_segment_that_notes_its_removal_is_deleted(
    tmp_path: Path, opened: Open
) -> None:
    opened("a").write(key(0), [b"x"])
    second = opened("a")
    second.write(key(1), [b"y"])
    second.remove(key(0))
    max((tmp_path / "a").glob("*.segment")).unlink()
    assert opened("a").read(key(0)) is None


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    """Let a function of the operating system fail, as on a broken or remote disk."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, fail)


def test_saved_prompts_on_a_read_only_disk_are_read_and_one_warning_is_logged(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened("a").write(key(0), [b"x"])
    store = opened("a")
    failing(monkeypatch, "open", errno.EROFS)
    failing(monkeypatch, "utime", errno.EROFS)
    for number in (1, 2):
        store.write(key(number), [b"y"])
    assert store.read(key(0)) == b"x" and store.read(key(1)) is None
    assert len(caplog.records) == 1 and "Read-only file system" in caplog.text


def test_full_disk_during_a_write_loses_only_the_page_that_is_being_written(opened: Open, tmp_path: Path) -> None:
    store = opened("a")
    store.write(key(0), [b"x"])
    assert store._file is not None
    store._file.close()
    store._file = Path("/dev/full").open("r+b")  # noqa: SIM115 - the store closes it
    store.write(key(1), [bytes(100)])
    assert not store.writes
    for reader in (store, opened("a")):
        assert reader.read(key(0)) == b"x" and reader.read(key(1)) is None


def test_saved_prompts_are_kept_if_other_programs_fill_the_disk(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened("a").write(key(0), [b"x"])
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    store = opened("b")
    store.write(key(1), [b"y"])
    assert not store.writes and opened("a").read(key(0)) == b"x"


def test_prompts_are_saved_again_after_a_full_disk_has_space(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = opened("a")
    store.write(key(0), [b"x"])
    assert store._file is not None
    store._file.close()
    store._file = Path("/dev/full").open("r+b")  # noqa: SIM115 - the store closes it
    store.write(key(1), [bytes(100)])
    now += 590
    store.write(key(1), [bytes(100)])
    assert not store.writes and store.read(key(1)) is None
    now += 20
    with monkeypatch.context() as full:
        failing(full, "open", errno.ENOSPC)
        assert store.writes
        store.write(key(1), [bytes(100)])
        assert not store.writes
    now += 610
    store.write(key(1), [bytes(100)])
    store.write(key(2), [b"y"])
    for reader in (store, opened("a")):
        assert [reader.read(key(number)) for number in range(3)] == [b"x", bytes(100), b"y"]
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1, "one warning, however often the disk is full"


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_read_error_of_a_network_drive_loses_only_the_requested_page(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    store = opened("a")
    for number in (0, 1):
        store.write(key(number), [b"x"])
    with monkeypatch.context() as broken:
        failing(broken, "pread", code)
        assert store.read(key(0)) is None
    assert store.read(key(0)) is None and store.read(key(1)) == b"x"
    assert len(caplog.records) == 1 and os.strerror(code) in caplog.text
    assert opened("a").read(key(0)) == b"x"  # the file itself is whole


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("days", [-400, 400])
def test_jump_of_the_clock_changes_no_saved_contents(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    store = opened("a", 20 << 10)
    store.write(key(0), [b"x" * 3000])
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + days * 86400)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + days * 86400 * 10**9)
    for number in range(1, 20):
        store.write(key(number), [bytes([number]) * 3000])
        assert store.read(key(number)) in (bytes([number]) * 3000, None)
        assert size(tmp_path) <= 20 << 10
    assert store.writes and store.read(key(19)) == bytes([19]) * 3000
    assert store.read(key(0)) in (b"x" * 3000, None)
