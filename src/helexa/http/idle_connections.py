"""Idle connections: how long they stay open, and whether their peers still exist."""

import asyncio
import select
import socket
import sys
from collections.abc import Callable

# Longer than the 60 s after which nginx and many load balancers close an idle connection. The client should close the
# connection before the server does, because a request that arrives while the server closes the connection fails.
KEEP_ALIVE_SECS = 75

EVICTABLE_SECS = 1.0  # after a shorter idle time, the client may be about to send its next request

# A dead peer is detected after 30 + 4 * 15 = 90 s. The default of Linux is two hours.
PROBE_AFTER_SECS = 30
INTERVAL_SECS = 15
PROBES = 4


class DeadlineTimer:
    """Keep-alive timer: calls a function at a deadline that is often postponed."""

    # If the deadline is postponed, the timer is kept. If the timer then fires before the deadline, it is started again.
    # To replace the timer at each change of the deadline would take more CPU time.
    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback: Callable[[], None] | None = callback
        self._deadline: float | None = None
        self._timer_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, secs: float) -> None:
        """Set the deadline to `secs` seconds from now. It replaces the previous deadline."""
        self._deadline = deadline = self._loop.time() + secs
        if self._timer is None or deadline < self._timer_at:
            self._cancel()
            self._start_timer(deadline)

    def clear(self) -> None:
        """Remove the deadline."""
        self._deadline = None

    def stop(self) -> None:
        """Stop this timer permanently, and release the reference to the function."""
        self._deadline = self._callback = None
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self, deadline: float) -> None:
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._deadline is None or self._callback is None:
            return
        if self._deadline > self._loop.time():
            self._start_timer(self._deadline)
        else:
            self._deadline = None
            self._callback()


class IdleConnections:
    """Connections that wait for a request, the longest idle first."""

    def __init__(self) -> None:
        # start of the idle time on the event loop's clock, client address, and the function that closes the connection
        self._entries: dict[object, tuple[float, str, Callable[[], bool]]] = {}

    def add(self, connection: object, address: str, evict: Callable[[], bool], now: float) -> None:
        """Register a connection that became idle at `now`, and is not registered yet.

        `evict` closes the connection and returns True, or returns False if the connection is still needed.
        """
        self._entries[connection] = now, address, evict

    def remove(self, connection: object) -> None:
        """Remove a connection that has a request or is closed."""
        self._entries.pop(connection, None)

    def evict(self, address: str | None, now: float) -> bool:
        """Close the connection that has been idle longest; return whether one was closed.

        A connection that has been idle for less than `EVICTABLE_SECS`, or is still needed, stays open.

        Args:
            address: consider only connections of this client address, or all connections if None.
        """
        for since, client, evict in self._entries.values():
            # The dict is sorted by the start of the idle time, so all later connections have been idle for less time.
            if since > now - EVICTABLE_SECS:
                return False
            if address in (None, client) and evict():
                return True
        return False


def enable_tcp_keep_alive(connection: socket.socket) -> None:
    """Enable TCP keep-alive probes on a socket, and on connections accepted from it.

    Probes are sent after `PROBE_AFTER_SECS` without traffic. The connection fails after `PROBES` probes without a
    reply.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", PROBE_AFTER_SECS), ("TCP_KEEPINTVL", INTERVAL_SECS), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):  # some systems lack some of these options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_gone(socket: int) -> bool:
    """Return whether the peer of an idle connection has closed its side.

    `socket` is a file descriptor. Unread data may still be buffered. Outside Linux, the result is always False.
    """
    if sys.platform != "linux":
        return False
    poll = select.poll()
    poll.register(socket, select.POLLRDHUP)
    return bool(poll.poll(0))


def has_input(socket: int) -> bool:
    """Return whether the descriptor `socket` has unread data, or its peer closed it."""
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))
