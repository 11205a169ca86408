"""TCP ports for programs whose port must be known before they start."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_FOLDER = Path(tempfile.gettempdir()) / f"helexa-test-ports-{os.getuid()}"
_taken: list[int] = []  # descriptors of lock files, open until this process ends


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of `address` that no other program takes until this process ends.

    Linux gives ports of one range to outgoing connections and to sockets that bind port 0, so that a free port of this
    range can be in use a moment later. The returned ports are outside of this range. A locked file for each port keeps
    other test processes from choosing the same port.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [*range(10_000, first), *range(last + 1, 65_536)]
    random.shuffle(ports)  # the suite may run twice on this machine
    _FOLDER.mkdir(mode=0o700, exist_ok=True)
    for port in ports:
        lock = os.open(_FOLDER / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            socket.create_server((address, port)).close()
        except OSError:
            os.close(lock)
            continue
        _taken.append(lock)
        return port
    raise RuntimeError(f"all ports outside of {first} to {last} are in use")
