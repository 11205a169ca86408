"""Network drives: the locks of NFS, file systems without locks, and without shared mappings."""

import errno
import fcntl
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helexa.acp.preferences import Grant, Preferences
from helexa.acp.session_store import Store
from helexa.cli.up_state_keys_and_logs import recorded, running_ups, state_folder
from helexa.core.errors import HelexaError
from helexa.cortex.ledger.storage.sqlite import open_sqlite
from helexa.generation.batch_file import ResultFile
from helexa.neuron.ops.native.kernel_library import _compile_lock
from helexa.neuron.processes.file_locks_and_threads import is_used, mark_used
from helexa.neuron.sources.download import locked_file
from helexa.neuron.sources.fetch_and_errors import Fetch

Flock = Callable[[int, int], None]


@pytest.fixture
def on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let locks follow the rules of NFS, which needs a readable or writable descriptor for each kind of lock."""
    flock: Flock = fcntl.flock

    def of_nfs(file: int, operation: int) -> None:
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if (operation & fcntl.LOCK_EX and mode == os.O_RDONLY) or (operation & fcntl.LOCK_SH and mode == os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `flock` fail as on Lustre that is mounted without the option `flock`."""

    def fail(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", fail)


@pytest.mark.usefixtures("on_nfs")
def test_running_helexa_up_is_found_if_the_home_folder_is_on_nfs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with recorded(state_folder("up", "4001"), "http://127.0.0.1:4001"):
        assert [up.port for up in running_ups()] == [4001]
    assert running_ups() == []


def test_helexa_up_of_another_host_in_a_shared_home_folder_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process id is that of another process on this host."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = state_folder("up", "4001")
    with recorded(folder, "http://127.0.0.1:4001"):
        record = json.loads((folder / "running.json").read_text())
        assert record["system"]  # on Linux
        (folder / "running.json").write_text(json.dumps(record | {"system": "of another host"}))
        assert running_ups() == []


@pytest.mark.usefixtures("on_nfs")
def test_model_file_in_use_on_nfs_is_recognized_as_used(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert not is_used(model)
    mark_used(model)
    assert is_used(model)


@pytest.mark.usefixtures("without_locks")
def test_downloads_and_kernel_builds_work_on_a_drive_without_file_locks(tmp_path: Path) -> None:
    fetch = Fetch(lambda _stage, _done, _total: None)
    with locked_file(tmp_path / "blob", lambda: False, fetch) as file:
        assert file is not None
        file.write(b"data")
    with _compile_lock(tmp_path / "kernels" / "key.so"):
        pass
    assert not is_used(tmp_path / "blob")


@pytest.mark.usefixtures("without_locks")
def test_batch_results_and_agent_sessions_work_on_a_drive_without_file_locks(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "results.jsonl"):
        pass
    assert Store(tmp_path).create("one", "/w", ()).exists()
    Preferences(tmp_path).grant("/w", Grant("bash", "ls *", True))
    assert Preferences(tmp_path).read("/w").grants == (Grant("bash", "ls *", True),)


@pytest.mark.usefixtures("without_locks")
async def test_sqlite_ledger_on_a_drive_without_file_locks_is_rejected_with_advice(tmp_path: Path) -> None:
    database = await open_sqlite(str(tmp_path / "cortex.db"))
    try:
        with pytest.raises(
            HelexaError, match="cannot be locked: Function not implemented; move the ledger to a file system"
        ):
            await database.claim()
    finally:
        await database.close()


def test_agent_sessions_are_listed_on_a_drive_without_shared_memory_mappings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FUSE with direct I/O, such as mergerfs, permits private mappings only."""
    real: Callable[..., Any] = mmap.mmap

    def private_only(file: int, size: int, access: int) -> Any:
        if access != mmap.ACCESS_COPY:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return real(file, size, access=access)

    monkeypatch.setattr(mmap, "mmap", private_only)
    Store(tmp_path).create("one", "/w", ())
    assert [entry.head.cwd for entry in Store(tmp_path).page(None, None)[0]] == ["/w"]
