"""Failures of hosts, stages and engines: an error in one line, and no process left."""

import asyncio
import os
import shutil
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from helexa.core.errors import DoesNotFitError, HelexaError, ModelFileError
from helexa.neuron.cache_folder import cache_root
from helexa.neuron.engine.ipc.messages import HostGroup
from helexa.neuron.engine_client.process_and_standby import COMMAND, Child
from injection import inject
from neuron.pipeline.conftest import GroupOf, hosts, running
from neuron.ranks.test_engine import FRANCE, GREEDY, assert_all_end, outputs_of
from without_torch import without_torch


def stage_processes() -> list[psutil.Process]:
    stages = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # the process has ended
            if "helexa.neuron.engine.stage_process" in child.cmdline():
                stages.append(child)
    return stages


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_killed_or_stopped_pipeline_stage_ends_the_engine_and_all_its_processes(
    tiny_gguf: Path, group_of: GroupOf, fault: signal.Signals
) -> None:
    died = asyncio.get_running_loop().create_future()
    settings = {"on_exit": died.set_result, "step_seconds": 1.5}
    async with running(tiny_gguf, group_of(2), **settings) as client:
        [stage] = stage_processes()
        processes = [psutil.Process(client.pid), stage]
        stream = client.generate(FRANCE, max_tokens=4000, sampling=GREEDY)
        await anext(stream)
        stage.send_signal(fault)
        outputs = [output async for output in stream]
        assert (outputs[-1].finish, outputs[-1].retry) == ("error", True)
        reason = "the connection to host 1 of the group" if fault == signal.SIGKILL else "no progress for 1.5 s"
        assert reason in await died
    assert_all_end(processes)


async def test_killed_engine_ends_its_stages_on_other_hosts(tiny_gguf: Path, group_of: GroupOf) -> None:
    async with running(tiny_gguf, group_of(2)) as client:
        processes = [psutil.Process(client.pid), *stage_processes()]
        assert len(processes) == 2
        os.kill(client.pid, signal.SIGKILL)
        assert_all_end(processes)


async def test_error_in_a_pipeline_stage_ends_the_engine(
    tiny_gguf: Path, group_of: GroupOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, "rank1/error@step=3")
    died = asyncio.get_running_loop().create_future()
    async with running(tiny_gguf, group_of(2), on_exit=died.set_result) as client:
        outputs = await outputs_of(client, "greedy")
        assert (outputs[-1].finish, outputs[-1].retry) == ("error", True)
        assert "host 1 of the group" in await died


async def load_error(model: Path, group: HostGroup, **settings: Any) -> HelexaError:
    with pytest.raises(HelexaError) as caught:
        async with running(model, group, **settings):
            pass
    assert_all_end(stage_processes())
    assert "\n" not in str(caught.value)
    return caught.value


async def test_pipeline_stage_that_fails_to_load_fails_the_load_of_the_model(
    tiny_gguf: Path, group_of: GroupOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, "rank1/error@load")
    assert "injected: error" in str(await load_error(tiny_gguf, group_of(2)))


async def test_load_fails_if_a_host_runs_another_version(
    tiny_gguf: Path, group_of: GroupOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in without_torch(tmp_path).items():
        monkeypatch.setenv(name, value)
    group = msgspec.structs.replace(group_of(2), version="0.0.1 abc")
    assert "but host 0 runs 0.0.1 abc" in str(await load_error(tiny_gguf, group))


async def test_load_fails_if_a_host_has_another_secret(tiny_gguf: Path, group_of: GroupOf) -> None:
    group = msgspec.structs.replace(group_of(2), secret=b"another secret of a group")
    assert "host 1 of the group: 127.0.0.2" in str(error := await load_error(tiny_gguf, group))
    assert "has another secret than this host" in str(error)


async def test_load_fails_if_a_host_has_a_different_model_file(
    tiny_gguf: Path, group_of: GroupOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts find different files at the same path in their cache folders."""
    for host, size in ((0, 0), (1, 1)):
        folder = tmp_path / f"cache{host}"
        folder.mkdir()
        (folder / "kernels").symlink_to(cache_root(None) / "kernels")  # to avoid compiling them again
        shutil.copy(tiny_gguf, folder / "model.gguf")
        with (folder / "model.gguf").open("ab") as file:
            file.write(b"\0" * size)
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path / "cache1"))  # inherited by the stage process
    command = ["env", f"HELEXA_CACHE={tmp_path / 'cache0'}", *COMMAND]
    model = tmp_path / "cache0" / "model.gguf"
    error = await load_error(model, group_of(2), spawn=partial(Child.spawn, command))
    assert isinstance(error, ModelFileError)
    assert "model.gguf on host 1" in str(error)
    assert "differs from the file on host 0" in str(error)


async def test_load_fails_if_a_pipeline_stage_does_not_fit_into_the_memory_of_its_host(tiny_gguf: Path) -> None:
    with hosts(min_free_floor_mb=1 << 20) as group_of:
        error = await load_error(tiny_gguf, group_of(2))
    assert isinstance(error, DoesNotFitError)
    assert "host 1 of the group: the model does not fit" in str(error)
