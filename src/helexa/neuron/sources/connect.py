"""Connect to a host that has several addresses, some of which may be unreachable."""

import os
import selectors
import socket
import time
from contextlib import ExitStack, suppress

_CONNECT_SECONDS = 3.0
_NEXT_ADDRESS_SECONDS = 0.25


class UnreachableError(OSError):
    """None of a host's addresses responded within the timeout."""


def connect(address: tuple[str, int], timeout: float, source: object = None) -> socket.socket:
    """Connect to the first address of a host that responds.

    This function replaces `socket.create_connection`, which tries the addresses one by one. If a firewall drops the
    packets to an address, `socket.create_connection` waits until the timeout before it tries the next address. This
    function starts an attempt for the next address every 0.25 s, and the earlier attempts continue.

    Args:
        address: host and port.
        timeout: timeout of the established connection, in seconds. Connecting takes at most `min(timeout, 3)` seconds.
        source: not used. It exists because `socket.create_connection` has this parameter.

    Raises:
        OSError: the host has no address, or all addresses refuse the connection.
        UnreachableError: no address responds within the timeout.
    """
    addresses = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    seconds = min(timeout, _CONNECT_SECONDS)
    deadline = time.monotonic() + seconds
    failure = OSError("no address")
    with selectors.DefaultSelector() as pending, ExitStack() as stack:
        while addresses or pending.get_map():
            if addresses:
                family, kind, protocol, _, socket_address = addresses.pop(0)
                try:
                    connection = stack.enter_context(socket.socket(family, kind, protocol))
                    connection.setblocking(False)
                    with suppress(BlockingIOError):
                        connection.connect(socket_address)
                except OSError as error:
                    failure = error
                    continue
                pending.register(connection, selectors.EVENT_WRITE, connection)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise UnreachableError(f"cannot be reached: no response for {seconds:g} s")
            for key, _ in pending.select(min(remaining, _NEXT_ADDRESS_SECONDS) if addresses else remaining):
                connection: socket.socket = key.data
                pending.unregister(connection)
                if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    failure = OSError(code, os.strerror(code))
                    continue
                connection = socket.socket(fileno=connection.detach())  # leaving the context closes the other sockets
                connection.settimeout(timeout)
                return connection
    raise failure
