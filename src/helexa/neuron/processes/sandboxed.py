"""The part of a sandbox that runs in the sandbox process: limits on memory and CPU time, and the request loop.

The operating system enforces the limits on the process, so expensive input ends the sandbox process and not the server.
`Sandbox` starts the processes. A module that runs in a sandbox process calls `serve`.
"""

import io
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from helexa.neuron.processes.frames import read_frame, write_frame

OUT_OF_MEMORY = 77
"""Exit code of a sandbox process whose input needs more memory than the limit."""


def serve(respond: Callable[[bytes], bytes], max_memory: int) -> None:
    """Answer requests from standard input on standard output, until standard input is closed.

    Args:
        respond: function that returns the response to a request.
        max_memory: maximum growth of the process's address space from now on, in bytes.
    """
    _limit_memory(max_memory)
    # With a buffer of one byte, a read never takes the byte after a frame, which carries the request's file descriptor.
    requests = io.BufferedReader(io.FileIO(0, closefd=False), buffer_size=1)
    try:
        while (request := read_frame(requests)) is not None:
            write_frame(sys.stdout.buffer, respond(request))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # skip cleanup, which could need memory


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """End this process if the code in the `with` block uses more than `seconds` of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process during any operation
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def receive_descriptor() -> int:
    """Return the file descriptor that the server sent with the current request (see `Sandbox.request`)."""
    with socket.socket(fileno=os.dup(0)) as channel:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    return descriptors[0]


def _limit_memory(max_memory: int) -> None:
    if sys.platform == "linux":  # other systems do not enforce a limit on address space
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + max_memory, used_bytes + max_memory))
