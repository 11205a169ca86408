"""Sandbox processes: they end before the program that uses them, also if they work."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from helexa.neuron.processes.inside_sandbox import write_frame
from helexa.neuron.processes.sandbox import ProcessPool, Sandbox, end_spares, start_spare

_TEMPLATE_PROCESS = "helexa.neuron.text.template_sandbox_process"

# A pipe as a FIFO file lets the module of the sandbox process say that it works on a request.
_MODULE = """
import os, time
from helexa.neuron.processes import inside_sandbox

def respond(body):
    print(os.getpid(), file=open(body.decode(), "w"), flush=True)
    time.sleep(600)

inside_sandbox.serve(respond, 1 << 30)
"""
_PROGRAM = """
import os, sys, threading
from helexa.neuron.processes.sandbox import ProcessPool, Sandbox, end_sandboxes

sandbox = Sandbox(ProcessPool("endless", kept=1), processes=1)
threading.Thread(target=sandbox.request, args=[sys.argv[1].encode()], daemon=True).start()
print(open(sys.argv[1]).read(), flush=True)
input()
"""


@pytest.mark.parametrize("exits", ["", "end_sandboxes(); os._exit(0)"])
def test_busy_sandbox_process_ends_when_its_parent_process_ends(tmp_path, exits):
    (tmp_path / "endless.py").write_text(_MODULE)
    os.mkfifo(tmp_path / "pids")
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM + exits, str(tmp_path / "pids")],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid = int(program.stdout.readline())
    os.kill(pid, signal.SIGSTOP)  # a stopped process cannot notice that its standard input is closed
    try:
        program.communicate("\n", timeout=60)
        assert program.returncode == 0
        assert not Path(f"/proc/{pid}").exists()
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open `count` more file descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(count)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, limits[1]))
    fillers = []
    try:
        while True:  # the descriptors below the limit
            fillers.append(os.dup(0))
    except OSError:
        pass
    for descriptor in free:
        os.close(descriptor)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in fillers:
            os.close(descriptor)


def test_sandbox_process_ends_without_an_error_message_if_its_parent_was_killed() -> None:
    serve = "from helexa.neuron.processes import inside_sandbox; inside_sandbox.serve(bytes.upper, 1 << 30)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", serve], **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdout.close()
        write_frame(process.stdin, b"request")
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_failed_start_of_a_sandbox_process_leaves_no_socket_open() -> None:
    sandbox = Sandbox(ProcessPool(_TEMPLATE_PROCESS, kept=1), processes=1)
    before = open_descriptors()
    # Three descriptors are enough for the socket pair, and too few for the pipe.
    with descriptors_left(3), pytest.raises(OSError, match="Too many open files"):
        sandbox.request(b"")
    assert open_descriptors() == before


def test_threads_that_start_a_spare_sandbox_process_at_once_start_only_one() -> None:
    before = set(psutil.Process().children())
    together = threading.Barrier(8)

    def start() -> None:
        together.wait()
        start_spare(_TEMPLATE_PROCESS)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    started = set(psutil.Process().children()) - before
    try:
        assert len(started) == 1
    finally:
        end_spares()
        for process in started:
            if process.is_running():
                process.kill()
                process.wait()
