"""The request loop and the limits inside a sandbox process.

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
from typing import BinaryIO

OUT_OF_MEMORY = 77  # exit code of a sandbox process whose input needs more memory than the limit

MAX_BYTES = 64 << 20  # maximum size of a frame's body, in bytes

_LENGTH_BYTES = 8


def serve(respond: Callable[[bytes], bytes], max_memory: int) -> None:
    """In a sandbox, answer requests from standard input until it is closed.

    Args:
        max_memory: maximum growth of the process's address space from now on, in bytes.
    """
    _limit_memory(max_memory)
    # The byte after a frame carries the request's file descriptor. With a buffer of one byte, reading the frame leaves
    # this byte unread.
    requests = io.BufferedReader(io.FileIO(0, closefd=False), buffer_size=1)
    try:
        while (request := read_frame(requests)) is not None:
            write_frame(sys.stdout.buffer, respond(request))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # skip cleanup, which could need memory
    except ConnectionError:
        os._exit(0)  # the server was killed; normal cleanup would try to write the rest of the answer, and fail


@contextmanager
def cpu_time_limit(seconds: float) -> Iterator[None]:
    """End this sandbox process if the block uses more CPU time than `seconds`."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process during any operation
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def receive_descriptor() -> int:
    """In a sandbox, return the file descriptor sent with the current request."""
    with socket.socket(fileno=os.dup(0)) as channel:
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    return descriptors[0]


def _limit_memory(max_memory: int) -> None:
    if sys.platform == "linux":  # other systems do not enforce a limit on address space
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + max_memory, used_bytes + max_memory))


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Send one frame with the body `body`.

    Raises:
        OSError: the receiver has closed the stream.
    """
    stream.write(len(body).to_bytes(_LENGTH_BYTES, "big"))
    stream.write(body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Wait for one frame and return its body; None if it is incomplete or too long."""
    header = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(header, "big")
    if len(header) < _LENGTH_BYTES or length > MAX_BYTES:
        return None
    body = stream.read(length)
    return body if len(body) == length else None
