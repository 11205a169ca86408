"""Processes that a command starts before it needs them."""

import errno
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from helexa.generation import early_start, target_choice
from helexa.generation.early_start import needs_engine
from helexa.generation.errors import EngineError
from helexa.generation.target_choice import PRIVATE, ModelLocation, Targets
from helexa.neuron.processes import sandbox
from helexa.neuron.processes.sandbox import ProcessPool
from helexa.neuron.text import TEMPLATE_PROCESS

COMMAND = "helexa.neuron.engine.process"


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_start, "LOCAL_URLS", ())


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("generate hi", True),
        ("run qwen3:0.6b hi", True),
        ("chat", True),
        ("generate --private hi", True),
        ("generate hi --url http://gateway", False),
        ("generate --url=http://gateway hi", False),
        ("run --help", False),
        ("list", False),
        ("", False),
    ],
)
def test_private_engine_is_started_early_only_for_commands_that_name_no_server(arguments: str, expected: bool) -> None:
    assert needs_engine(arguments.split(), {}) is expected


@pytest.mark.usefixtures("no_server")
def test_no_private_engine_is_started_early_if_the_environment_names_a_server() -> None:
    assert not needs_engine(["generate", "hi"], {"HELEXA_BASE_URL": "http://gateway"})
    assert needs_engine(["generate", "hi", "--private"], {"HELEXA_BASE_URL": "http://gateway"})


def test_no_private_engine_is_started_early_if_a_server_runs_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(early_start, "LOCAL_URLS", (f"http://127.0.0.1:{server.getsockname()[1]}",))
        assert not needs_engine(["generate", "hi"], {})
    assert needs_engine(["generate", "hi"], {})


@pytest.mark.usefixtures("no_server")
def test_private_engine_starts_before_the_command_line_is_parsed(tmp_path: Path) -> None:
    """The command fails at its parser, and its engine process ends with it."""
    program = f"""
import sys
from helexa.generation import early_start
early_start.LOCAL_URLS = ()
sys.argv = ["helexa", "generate", "--no-such-option"]
from helexa.__main__ import main
try:
    main()
finally:
    import psutil
    engines = [child.pid for child in psutil.Process().children() if {COMMAND!r} in child.cmdline()]
    print(*engines, flush=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert run.returncode == 2
    (engine,) = map(int, run.stdout.split())
    psutil.wait_procs([psutil.Process(engine)] if psutil.pid_exists(engine) else [], timeout=60)
    assert not psutil.pid_exists(engine)


def template_processes() -> set[int]:
    return {child.pid for child in psutil.Process().children() if TEMPLATE_PROCESS in child.cmdline()}


def started_spare(before: set[int]) -> int:
    """Start a spare process, and wait until its command line is visible, which is a moment after its start."""
    sandbox.end_spares()  # a spare process of an earlier test would be kept, and no other started
    sandbox.start_spare(TEMPLATE_PROCESS)
    while not (started := template_processes() - before):
        time.sleep(0.001)
    (spare,) = started
    return spare


def test_process_pool_takes_the_chat_template_process_that_was_started_early() -> None:
    before = template_processes()  # of other tests
    spare = started_spare(before)
    pool = ProcessPool(TEMPLATE_PROCESS, kept=1)
    process = pool.take()
    assert template_processes() - before == {spare}
    pool.give_back(process)
    pool.close()
    assert not psutil.pid_exists(spare)


def test_chat_template_process_that_was_started_early_and_not_used_is_ended() -> None:
    spare = started_spare(template_processes())
    sandbox.end_spares()
    assert not psutil.pid_exists(spare)


async def test_failed_start_of_a_sandbox_process_ends_the_early_started_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        raise OSError(errno.EAGAIN, f"no process for {module}")

    monkeypatch.setattr(target_choice, "start_spare", fail)
    before = {process.pid for process in psutil.Process().children()}
    used = Targets()
    with pytest.raises(EngineError, match="no engine can start: no process for"):
        await used.find(ModelLocation(target=PRIVATE))
    assert {process.pid for process in psutil.Process().children()} <= before
    await used.close()
