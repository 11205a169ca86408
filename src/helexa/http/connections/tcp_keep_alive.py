"""TCP keep-alive probes, which detect that the remote host of an idle connection is gone."""

import socket

IDLE_SECS = 30
INTERVAL_SECS = 15
PROBES = 4


def enable_tcp_keep_alive(connection: socket.socket) -> None:
    """Enable TCP keep-alive probes on a socket.

    Probes are sent after `IDLE_SECS` without traffic. The connection fails after `PROBES` probes without a reply.
    Connections that are accepted from a listening socket inherit these settings.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", IDLE_SECS), ("TCP_KEEPINTVL", INTERVAL_SECS), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, name):  # some systems lack some of these options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
