"""Notifies systemd of the state of this process (units with `Type=notify`)."""

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send `state` to the service manager, such as `READY=1` or `STOPPING=1`. Do nothing without a service manager.

    The protocol is one datagram to the Unix socket in the environment variable `NOTIFY_SOCKET`. An address that begins
    with `@` is in Linux's abstract namespace.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
