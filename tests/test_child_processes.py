"""The pytest plugin `child_processes`, tested in a pytest run that starts as a shell's background command."""

import re
import subprocess
import sys
from pathlib import Path

import psutil

TESTS = '''
import asyncio, gc, signal, subprocess, sys

CODE = """
import signal
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
signal.pause()
"""

def started():
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    print(f"pid={process.pid}")
    return process

def test_failure_leaves_a_process():
    process = started()
    assert process.stdout.readline() == "wrong"

async def test_failure_leaves_a_process_of_an_event_loop():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", CODE, stdout=subprocess.PIPE)
    print(f"pid={process.pid}")
    assert await process.stdout.readline() == b"wrong"

def test_sigint_ends_a_process():
    for _ in range(5):
        gc.collect()
    with started() as process:
        assert process.stdout.readline() == "True\\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
'''


def test_failed_test_leaves_no_child_process_and_sigint_reaches_child_processes(tmp_path: Path) -> None:
    folder = Path(__file__).parent
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {folder}\nasyncio_mode = auto\nfilterwarnings = error\n"
        "asyncio_default_fixture_loop_scope = function\n"
    )
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["child_processes"]\n')
    (tmp_path / "test_processes.py").write_text(TESTS)
    ignoring = "import os, signal, sys; signal.signal(2, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:schemathesis", "-p", "no:xdist")
    run = subprocess.run(
        [sys.executable, "-c", ignoring, sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "2 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    pids = [int(pid) for pid in re.findall(r"pid=(\d+)", run.stdout)]
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
