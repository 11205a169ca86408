"""Authenticated connections between hosts, over real sockets."""

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest

from helexa.neuron.engine.ipc.host_channel import (
    MAX_FRAME_BYTES,
    Channel,
    ChannelError,
    HostAddress,
    SecretError,
    accept,
    connect,
    wait_until_closed,
)
from ports import free_port

SECRET = b"correct horse battery staple"
SECONDS = 10.0


class Note(msgspec.Struct, tag="note"):
    text: str


@contextmanager
def accepting(secret: bytes = SECRET) -> Iterator[tuple[HostAddress, "Future[Channel]"]]:
    """Accept and authenticate one connection in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: accept(listener.accept()[0], secret, seconds=SECONDS))
        yield HostAddress("127.0.0.1", listener.getsockname()[1]), future


def open_channel(address: HostAddress, secret: bytes = SECRET) -> Channel:
    return connect(address, secret, source="127.0.0.1", seconds=SECONDS)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    with accepting() as (address, future):
        connected, accepted = open_channel(address), future.result()
        yield connected, accepted
        connected.close()
        accepted.close()


def test_channel_messages_arrive_in_both_directions(ends: tuple[Channel, Channel]) -> None:
    connected, accepted = ends
    connected.send(Note("to the accepting end"))
    accepted.send(Note("to the connecting end"))
    accepted.send_bytes(b"\0" * 100_000)
    assert accepted.receive(Note) == Note("to the accepting end")
    assert connected.receive(Note) == Note("to the connecting end")
    assert connected.receive_bytes() == b"\0" * 100_000


def test_channel_transferred_to_another_process_continues(ends: tuple[Channel, Channel]) -> None:
    connected, accepted = ends
    connected.send(Note("first"))
    assert accepted.receive(Note) == Note("first")
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(accepted.state), type=type(accepted.state))
    continued = Channel(socket.socket(fileno=os.dup(accepted.fileno())), state)
    connected.send(Note("second"))
    assert continued.receive(Note) == Note("second")
    continued.send(Note("reply"))
    assert connected.receive(Note) == Note("reply")
    continued.close()


def test_connection_with_another_secret_is_rejected_at_both_ends() -> None:
    with accepting() as (address, future):
        with pytest.raises(SecretError, match="has another secret than this host"):
            open_channel(address, b"another secret of a host")
        with pytest.raises(ChannelError):
            future.result()


def test_connection_without_the_secret_is_rejected() -> None:
    """A client without the secret cannot compute a valid proof, although it does not check the server's proof."""
    with accepting() as (address, future), socket.create_connection((address.address, address.port)) as client:
        client.sendall(b"helexa-group-1\n\0" + bytes(32))
        assert len(client.recv(64, socket.MSG_WAITALL)) == 64
        client.sendall(bytes(32))
        with pytest.raises(SecretError, match="a host with another secret tried to connect"):
            future.result()


def test_connection_of_another_protocol_is_rejected() -> None:
    with accepting() as (address, future), socket.create_connection((address.address, address.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: example.com\r\nAccept: */*\r\n\r\n")
        with pytest.raises(ChannelError, match="a program that is not a helexa node"):
            future.result()


def changed(header: bytes, body: bytes) -> bytes:
    return header + bytes([body[0] ^ 1]) + body[1:]


def repeated(header: bytes, body: bytes) -> bytes:
    return (header + body) * 2


def longer_than_the_limit(header: bytes, body: bytes) -> bytes:
    return struct.pack("<I", MAX_FRAME_BYTES + 1) + header[4:] + body


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (changed, "not sent by the other host"),
        (repeated, "not sent by the other host"),
        (longer_than_the_limit, "over the limit"),
    ],
)
def test_tampered_channel_frames_are_rejected(
    ends: tuple[Channel, Channel], tamper: Callable[[bytes, bytes], bytes], reason: str
) -> None:
    connected, accepted = ends
    near, far = socket.socketpair()
    with near, far:
        Channel(near, connected.state).send(Note("pay 5"))
        frame = far.recv(1 << 16)
        os.write(connected.fileno(), tamper(frame[:20], frame[20:]))
    with pytest.raises(ChannelError, match=reason):
        for _ in range(2):
            accepted.receive(Note)


def test_channel_frame_sent_back_to_its_sender_is_rejected(ends: tuple[Channel, Channel]) -> None:
    connected, _ = ends
    near, far = socket.socketpair()
    with near, far:
        own = Channel(near, connected.state)
        own.send(Note("hello"))
        far.sendall(far.recv(1 << 16))
        with pytest.raises(ChannelError, match="not sent by the other host"):
            own.receive(Note)


def test_channel_message_of_an_unexpected_type_is_an_error(ends: tuple[Channel, Channel]) -> None:
    connected, accepted = ends
    connected.send_bytes(b"\x93\x01\x02\x03")
    with pytest.raises(ChannelError, match="unexpected message"):
        accepted.receive(Note)


def test_closing_a_channel_raises_an_error_at_the_other_end(ends: tuple[Channel, Channel]) -> None:
    connected, accepted = ends
    connected.send(Note("unread"))
    assert not wait_until_closed(accepted.fileno(), 0)
    closing = threading.Thread(target=connected.close)
    closing.start()
    assert wait_until_closed(accepted.fileno(), SECONDS)
    closing.join()
    assert accepted.receive(Note) == Note("unread")
    with pytest.raises(ChannelError, match="closed the connection"):
        accepted.receive(Note)


def test_connection_to_an_address_without_a_listener_is_an_error() -> None:
    port = free_port()
    with pytest.raises(ChannelError, match=f"cannot connect to 127.0.0.1:{port}: Connection refused"):
        open_channel(HostAddress("127.0.0.1", port))
