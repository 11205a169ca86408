"""A server's process: event loop, files, garbage collection, signals, sockets."""

import asyncio
import errno
import gc
import os
import resource
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run the coroutine `work` in a new event loop until it returns."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


# Some child processes loop over all descriptors up to the limit. In a container, the hard limit can be 2**30, so this
# process does not raise its limit that far.
_MAX_DESCRIPTORS = 1 << 16


def raise_descriptor_limit() -> int:
    """Raise the limit on open files to the hard limit, at most 65,536, and return it."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    target_limit = _MAX_DESCRIPTORS if hard_limit == resource.RLIM_INFINITY else min(hard_limit, _MAX_DESCRIPTORS)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < target_limit:
        with suppress(ValueError, OSError):  # macOS allows less than the hard limit that it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (target_limit, hard_limit))
    return descriptor_limit()


def descriptor_limit() -> int:
    """Return the process's soft limit on open files, or 65,536 if the limit is larger."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_DESCRIPTORS if soft_limit == resource.RLIM_INFINITY else min(soft_limit, _MAX_DESCRIPTORS)


def notify(state: str) -> None:
    """Try to send `state`, such as `READY=1`, to systemd; errors are ignored."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    # An address that begins with `@` is in Linux's abstract namespace.
    if address.startswith(("/", "@")):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def collect_seldom() -> None:
    """Configure Python's garbage collector to run less often than by default.

    Reference cycles among the objects that exist now are never collected, so call this function after the start.
    """
    # Requests create hardly any reference cycles, so there is little to collect. With the default settings, the garbage
    # collector would take 5 % of the CPU time of requests.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def on_stop_signals(stop: Callable[[], None]) -> None:
    """Call `stop` at each SIGINT and SIGTERM. Must be called in a running event loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # some event loops have no signal handlers
            loop.add_signal_handler(number, stop)


def on_reload_signal(reload: Callable[[], None], stop: Callable[[], None]) -> None:
    """Call `reload` at each SIGHUP, or `stop` if the process runs in a terminal.

    Must be called in a running event loop.
    """
    # A terminal sends SIGHUP when it is closed. Service managers send SIGHUP so that a server reads its files again.
    with suppress(NotImplementedError, OSError, ValueError):  # some event loops have no signal handlers
        in_terminal = os.isatty(0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, stop if in_terminal else reload)


OUT_OF_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_LOCAL = OUT_OF_DESCRIPTORS | {errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}  # EADDRNOTAVAIL: no local port is free


def is_local_error(error: Exception) -> bool:
    """Return whether `error` is due to a lack of local descriptors, ports or memory.

    If no file descriptor is left, the result is True for every error, because some functions, such as name lookups,
    hide the cause of their errors.
    """
    return (isinstance(error, OSError) and error.errno in _LOCAL) or not _descriptor_left()


def _descriptor_left() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in _LOCAL
    return True
