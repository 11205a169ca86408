"""The parent-death watch kills processes when their parent ends."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BUSY = """
import subprocess, sys
from helexa.neuron.processes import parent_watch
parent_watch.start()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
print(child.pid, flush=True)
while True:
    sum(range(10**6))
"""


def test_busy_process_and_its_children_end_when_the_parents_pipe_closes():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    process.stdin.close()
    assert process.wait(60) == -9
    deadline = time.monotonic() + 60
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.stdout.close()


@pytest.mark.parametrize(("source", "code"), [("print(__name__, sys.argv[1:])", 0), ("sys.exit(3)", 3)])
def test_module_run_under_the_parent_watch_keeps_its_output_and_exit_code(tmp_path: Path, source: str, code: int):
    (tmp_path / "guest.py").write_text(f"import sys\n{source}\n")
    command = [sys.executable, "-m", "helexa.neuron.processes.parent_watch", "guest", "--to", "x"]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert run.stdout is not None
    assert run.stdout.read() == ("" if code else "__main__ ['--to', 'x']\n")
    assert run.wait(60) == code
    run.communicate()
