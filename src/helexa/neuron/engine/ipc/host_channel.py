"""Authenticated TCP connections between the hosts of a group.

Both ends prove that they know the group's secret before any message is read. Each frame has a message authentication
code (MAC) over its position in the stream and its contents, so that frames cannot be changed, repeated or reordered.
The frames are not encrypted.

A frame is the 4-byte little-endian length of its body, 16 bytes of MAC, and the body. A body is a tagged msgpack
struct, or the raw bytes of a tensor.
"""

import hmac
import os
import select
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec

from helexa.core.errors import HelexaError

MAX_FRAME_BYTES = 64 << 20

_MAGIC = b"helexa-group-1\n\0"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAC_BYTES = 16
_HEADER = struct.Struct(f"<I{_MAC_BYTES}s")
_POSITION = struct.Struct("<?Q")  # direction (whether the connecting end sent the frame), number of the frame
_IDLE_SECONDS, _PROBE_SECONDS, _PROBES = 5, 2, 3  # TCP keepalive: a host that vanishes is detected after 11 s

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview


class ChannelError(HelexaError):
    """The other host closed the connection, or sent bytes that are not a frame."""


class SecretError(ChannelError):
    """The other host does not know the group's secret."""


class ChannelState(msgspec.Struct, frozen=True):
    """State with which another process can continue to use a channel's connection."""

    key: bytes  # key of the MACs
    connected: bool  # whether this end opened the connection. The other end accepted it.
    # number of frames so far in each direction
    sent: int
    received: int


class Channel:
    """One end of an authenticated connection.

    Methods block; only one thread may send, and only one may receive.

    Args:
        connection: the connected socket, which the channel owns.
        state: state after the handshake, or after the frames that another process has exchanged.
    """

    def __init__(self, connection: socket.socket, state: ChannelState) -> None:
        self._connection = connection
        self._key = state.key
        self._connected = state.connected
        self._sent, self._received = state.sent, state.received

    @property
    def state(self) -> ChannelState:
        """State for another process, which alone may use the connection from then on."""
        return ChannelState(self._key, self._connected, self._sent, self._received)

    def fileno(self) -> int:
        """Return the file descriptor of the connection."""
        return self._connection.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message.

        Raises:
            ChannelError: the connection is closed.
        """
        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, body: Bytes) -> None:
        """Send a frame with the body `body`, at most `MAX_FRAME_BYTES` bytes.

        Raises:
            ChannelError: the connection is closed.
        """
        body = memoryview(body).cast("B")
        header = _HEADER.pack(len(body), self._mac(self._connected, self._sent, body))
        self._sent += 1
        try:
            # Two calls, because joining header and body would copy up to 64 MiB.
            self._connection.sendall(header)
            self._connection.sendall(body)
        except OSError as error:
            raise ChannelError(
                f"could not send to the other host: {error.strerror or error}; check that the node on that host runs"
            ) from None

    def receive(self, kind: type[T] | Any) -> T:
        """Wait for the next message of type `kind`, which may be a union, and return it.

        Raises:
            ChannelError: the connection is closed, or the next frame is not a message of type `kind`.
        """
        body = self.receive_bytes()
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise ChannelError(
                f"unexpected message of the other host: {error}; install the same helexa version on both hosts"
            ) from None

    def receive_bytes(self) -> bytearray:
        """Wait for the next frame and return its body.

        Raises:
            ChannelError: the connection is closed, or the frame is invalid.
        """
        length, mac = _HEADER.unpack(_exactly(self._connection, _HEADER.size))
        # The MAC can be checked only after the body is read, so the length of the body is not trusted yet.
        if length > MAX_FRAME_BYTES:
            raise ChannelError(
                f"the other host sent a message of {length} bytes, over the limit of {MAX_FRAME_BYTES}; "
                "install the same helexa version on both hosts"
            )
        body = _exactly(self._connection, length)
        # The MAC covers the direction, so that an attacker cannot send the frames of this end back to this end.
        if not hmac.compare_digest(mac, self._mac(not self._connected, self._received, body)):
            raise ChannelError(
                "received data with a wrong MAC, which was not sent by the other host, or was changed in the network; "
                "load the model again"
            )
        self._received += 1
        return body

    def close(self) -> None:
        """Close the connection, so that `receive` at the other end raises a ChannelError.

        A call that is blocked in another thread of this process raises a ChannelError, too.
        """
        with suppress(OSError):
            # `close` alone does not wake a thread that is blocked in `recv`.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _mac(self, from_connecting_end: bool, number: int, body: Bytes) -> bytes:
        code = blake2b(_POSITION.pack(from_connecting_end, number), key=self._key, digest_size=_MAC_BYTES)
        code.update(body)
        return code.digest()


@dataclass(frozen=True)
class HostAddress:
    """Where a host of the group accepts connections."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def connect(to: HostAddress, secret: bytes, *, source: str, seconds: float) -> Channel:
    """Connect to a host of the group and return the channel.

    Args:
        source: own address, from which the connection is opened.
        seconds: time limit of the connection and of the handshake.

    Raises:
        SecretError: the other host has another secret.
        ChannelError: the other host does not answer, or closed the connection.
    """
    try:
        connection = socket.create_connection((to.address, to.port), seconds, source_address=(source, 0))
    except OSError as error:
        raise ChannelError(
            f"cannot connect to {to}: {error.strerror or error}; check that the node on that host runs"
        ) from None
    try:
        _configure(connection)
        # Each end chooses half of the nonces, so that no recorded handshake can be repeated.
        own = os.urandom(_NONCE_BYTES)
        connection.sendall(_MAGIC + own)
        reply = _exactly(connection, _NONCE_BYTES + _PROOF_BYTES, str(to))
        nonces = own + reply[:_NONCE_BYTES]
        if not hmac.compare_digest(reply[_NONCE_BYTES:], _proof(secret, b"accept", nonces)):
            raise SecretError(f"{to} has another secret than this host; use the same [group] secret_file on both hosts")
        connection.sendall(_proof(secret, b"connect", nonces))
        connection.settimeout(None)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise ChannelError(
                f"{to} does not answer: {error.strerror or error}; check that the node on that host runs"
            ) from None
        raise
    return Channel(connection, ChannelState(_proof(secret, b"session", nonces), connected=True, sent=0, received=0))


def accept(connection: socket.socket, secret: bytes, *, seconds: float) -> Channel:
    """Authenticate a host that has connected, and return the channel.

    On an error, the connection is closed.

    Args:
        seconds: time limit of each message of the handshake.

    Raises:
        SecretError: the other host has another secret.
        ChannelError: the other end is not a host of a group, or closed the connection.
    """
    try:
        _configure(connection)
        connection.settimeout(seconds)
        hello = _exactly(connection, len(_MAGIC) + _NONCE_BYTES)
        if not hello.startswith(_MAGIC):
            raise ChannelError(
                "a program that is not a helexa node connected to the port of the host group, and was disconnected"
            )
        own = os.urandom(_NONCE_BYTES)
        nonces = bytes(hello[len(_MAGIC) :]) + own
        connection.sendall(own + _proof(secret, b"accept", nonces))
        if not hmac.compare_digest(_exactly(connection, _PROOF_BYTES), _proof(secret, b"connect", nonces)):
            raise SecretError(
                "a host with another secret tried to connect; use the same [group] secret_file on both hosts"
            )
        connection.settimeout(None)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise ChannelError(
                f"the handshake with the connecting host failed: {error.strerror or error}; see the log of the node "
                "on that host"
            ) from None
        raise
    return Channel(connection, ChannelState(_proof(secret, b"session", nonces), connected=False, sent=0, received=0))


def wait_until_closed(fd: int, seconds: float | None = None) -> bool:
    """Wait until the connection `fd` is closed or broken, and return True.

    Return False after `seconds` seconds. Received bytes do not end the wait and are not read.
    """
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def _configure(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    # Keepalive does not cover unacknowledged bytes, which TCP would retransmit for about 15 minutes.
    limit_ms = (_IDLE_SECONDS + _PROBE_SECONDS * _PROBES) * 1000
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def _proof(secret: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + nonces, "sha256")


def _exactly(connection: socket.socket, size: int, sender: str = "the other host") -> bytearray:
    """Receive exactly `size` bytes. `sender` names the other host in errors."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            count = connection.recv_into(view)
        except OSError as error:
            raise ChannelError(
                f"could not receive from {sender}: {error.strerror or error}; check that the node on that host runs"
            ) from None
        # An empty read means the end of the stream.
        if not count:
            raise ChannelError(f"{sender} closed the connection; see the log of the node on that host")
        view = view[count:]
    return data
