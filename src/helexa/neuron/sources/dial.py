"""Connect to a host with several addresses, some of which may be unreachable."""

import os
import selectors
import socket
import time
from contextlib import ExitStack, suppress

_SECONDS = 3.0
_NEXT_SECONDS = 0.25


class UnreachableError(OSError):
    """No address of a host answered in time."""


def dial(address: tuple[str, int], patience: float, source: object = None) -> socket.socket:
    """Connect to the first address of a host that answers. Replaces `socket.create_connection`, which tries them in
    turn.

    An address behind a firewall that drops packets would cost a full timeout. Therefore the next address is tried every
    0.25 s while earlier attempts continue.

    Args:
        address: host and port.
        patience: timeout of the established connection, in seconds. Connecting takes at most `patience` or 3 s, if
            shorter.
        source: not used.

    Raises:
        OSError: the host has no address, or all addresses refuse.
        UnreachableError: no address answers in time.
    """
    places = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    seconds = min(patience, _SECONDS)
    deadline = time.monotonic() + seconds
    failure = OSError("no address")
    with selectors.DefaultSelector() as dialled, ExitStack() as lines:
        while places or dialled.get_map():
            if places:
                family, kind, protocol, _, place = places.pop(0)
                try:
                    line = lines.enter_context(socket.socket(family, kind, protocol))
                    line.setblocking(False)
                    with suppress(BlockingIOError):
                        line.connect(place)
                except OSError as error:
                    failure = error
                    continue
                dialled.register(line, selectors.EVENT_WRITE, line)
            left = deadline - time.monotonic()
            if left <= 0:
                raise UnreachableError(f"cannot be reached: no response for {seconds:g} s")
            for key, _ in dialled.select(min(left, _NEXT_SECONDS) if places else left):
                line: socket.socket = key.data
                dialled.unregister(line)
                if code := line.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failure = OSError(code, os.strerror(code))
                    continue
                line = socket.socket(fileno=line.detach())  # leaving the context closes the other sockets
                line.settimeout(patience)
                return line
    raise failure
