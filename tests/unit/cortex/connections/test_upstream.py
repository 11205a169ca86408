"""The HTTP client for requests to nodes, against servers that send scripted bytes."""

import asyncio
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.running_gateway import eventually
from helexa.core.errors import ConfigError
from helexa.cortex.config import load
from helexa.cortex.fleet.node_client import NodeClient
from helexa.cortex.fleet.node_errors import NodeError
from helexa.cortex.upstream import client as upstream_client
from helexa.cortex.upstream.client import Upstream
from helexa.cortex.upstream.connection_and_timeouts import (
    ConnectError,
    IncompleteResponseError,
    ReadTimeoutError,
    UpstreamResponse,
    parse_base,
)
from helexa.cortex.upstream.tls import client_context

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


class Server:
    """A server that answers each request with the next of `answers` and records the requests.

    Args:
        close: close the connection after each response.
        pieces: bytes per write; 0 writes a response at once.
        unanswered: number of the request after which the connection is closed without a response.
    """

    def __init__(self, *responses: bytes, close: bool = False, write_size: int = 0, unanswered: int = 0) -> None:
        self.responses = list(responses)
        self.close = close
        self.write_size = write_size
        self.unanswered = unanswered
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while self.responses:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                if len(self.requests) == self.unanswered:
                    return
                response_bytes = self.responses.pop(0)
                for start in range(0, len(response_bytes), self.write_size or len(response_bytes) or 1):
                    writer.write(response_bytes[start : start + (self.write_size or len(response_bytes))])
                    await writer.drain()
                    if self.write_size:
                        await asyncio.sleep(0)
                if self.close:
                    return
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            writer.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Server"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base"
        try:
            yield self
        finally:
            server.close()


@pytest.fixture
async def client() -> AsyncIterator[Upstream]:
    client = Upstream()
    yield client
    client.close()
    await asyncio.sleep(0)


async def ask(client: Upstream, server: Server, body: bytes = b"{}") -> UpstreamResponse:
    return await client.ask(b"POST", server.url, "/v1/x", [(b"x-a", b"1")], body)


async def read(response_bytes: UpstreamResponse) -> bytes:
    body = b""
    while chunk := await response_bytes.chunk():
        body += chunk
    response_bytes.close()
    return body


@pytest.mark.parametrize("write_size", [0, 1, 7])
@pytest.mark.parametrize(
    "response_bytes", [OK, CHUNKED, *(b"HTTP/1.1 %d\r\nx-early: 1\r\n\r\n" % n * 3 + OK for n in (100, 102))]
)
async def test_response_sent_in_pieces_arrives_and_its_connection_is_reused(
    client: Upstream, response_bytes: bytes, write_size: int
) -> None:
    async with Server(response_bytes, response_bytes, write_size=write_size).serving() as server:
        for _ in range(2):
            response = await ask(client, server, b"body")
            assert response.status == 200
            assert b"x-early" not in dict(response.headers)
            assert await read(response) == b"hello"
        assert server.connections == 1
        host = server.url.split("/")[2].encode()
        expected = b"POST /base/v1/x HTTP/1.1\r\nhost: %s\r\nx-a: 1\r\ncontent-length: 4\r\n\r\nbody" % host
        assert server.requests == [expected] * 2


async def test_response_body_without_a_length_ends_with_the_connection(client: Upstream) -> None:
    async with Server(b"HTTP/1.1 200 OK\r\n\r\nhello", close=True).serving() as server:
        assert await read(await ask(client, server)) == b"hello"


async def test_request_body_of_2_mib_is_sent_completely_to_the_node(client: Upstream) -> None:
    body = bytes(range(256)) * (8 << 10)
    async with Server(OK).serving() as server:
        assert await read(await ask(client, server, body)) == b"hello"
        assert server.requests[0].endswith(body)


async def test_refused_connection_raises_connect_error(client: Upstream) -> None:
    async with Server().serving() as server:
        pass
    with pytest.raises(ConnectError):
        await ask(client, server)


async def test_connection_succeeds_although_the_gateway_process_was_paused_past_the_timeout() -> None:
    client = Upstream(connect_timeout_secs=0.3)
    async with Server(OK).serving() as server:
        asking = asyncio.create_task(ask(client, server))
        await asyncio.sleep(0)  # begins to connect
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
        assert await read(await asking) == b"hello"
    client.close()


@pytest.mark.parametrize(
    "response_bytes",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nconte",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * (70 << 10) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (40 << 10) + b"\r\n",
    ],
)
async def test_invalid_response_head_raises_incomplete_response_error(client: Upstream, response_bytes: bytes) -> None:
    async with Server(response_bytes, close=True).serving() as server:
        with pytest.raises(IncompleteResponseError):
            await ask(client, server)


@pytest.mark.parametrize(
    "response_bytes",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n",
    ],
)
async def test_truncated_response_body_raises_incomplete_response_error(
    client: Upstream, response_bytes: bytes
) -> None:
    async with Server(response_bytes, close=True).serving() as server:
        response = await ask(client, server)
        with pytest.raises(IncompleteResponseError):
            await read(response)
        response.close()


async def test_response_that_stalls_raises_read_timeout_error(client: Upstream) -> None:
    client.timeouts.idle_secs = 0.5
    async with Server(b"").serving() as server:
        with pytest.raises(ReadTimeoutError):
            await ask(client, server)
    async with Server(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello").serving() as server:
        response = await ask(client, server)
        assert await response.chunk() == b"hello"
        with pytest.raises(ReadTimeoutError):
            await response.chunk()


async def test_response_body_without_a_length_is_incomplete_after_a_read_timeout(client: Upstream) -> None:
    """The timeout expires while the reader handles the bytes that arrived before."""
    async with Server(b"HTTP/1.1 200 OK\r\n\r\nhello").serving() as server:
        response = await ask(client, server)
        assert await response.chunk() == b"hello"
        connection = response._connection
        client.timeouts.idle_secs = 0.0
        connection._check_silence()
        await eventually(lambda: connection._transport is None)
        with pytest.raises(ReadTimeoutError):
            await response.chunk()
        assert not response.complete


async def test_lowered_response_timeout_applies_to_a_reused_connection(client: Upstream) -> None:
    async with Server(OK, b"").serving() as server, asyncio.timeout(60):
        assert await read(await ask(client, server)) == b"hello"
        client.timeouts.answer_secs = 0.05
        with pytest.raises(ReadTimeoutError):
            await client.ask(b"POST", server.url, "/", [], b"", is_alive=lambda: True)
        assert server.connections == 1


async def test_idle_connections_send_tcp_keepalive_probes(client: Upstream) -> None:
    async with Server(OK).serving() as server:
        response = await ask(client, server)
        port = int(server.url.split(":")[2].split("/")[0])

        def probed() -> bool:
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                _, _, remote, state, _, timer, *_ = line.split()
                if int(remote.split(":")[1], 16) == port and state == "01":
                    return timer.startswith("02")  # the keep-alive timer runs
            return False

        await eventually(probed)
        response.close()


async def test_pooled_connection_closed_by_the_server_is_replaced(
    client: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_client, "UNCHECKED_SECS", 0.0)
    async with Server(OK, OK, close=True).serving() as server:
        for _ in range(2):
            assert await read(await ask(client, server)) == b"hello"
            await eventually(lambda: server.open == 0)
        assert server.connections == 2


@pytest.mark.parametrize(("method", "repeatable"), [(b"GET", False), (b"POST", True)])
async def test_repeatable_request_is_resent_if_its_pooled_connection_was_closed(
    client: Upstream, method: bytes, repeatable: bool
) -> None:
    async with Server(OK, OK, unanswered=2).serving() as server:
        assert await read(await ask(client, server)) == b"hello"
        assert await read(await client.ask(method, server.url, "/v1/x", [], repeatable=repeatable)) == b"hello"
        assert (len(server.requests), server.connections) == (3, 2)


async def test_post_that_is_not_repeatable_is_not_resent_if_its_pooled_connection_was_closed(client: Upstream) -> None:
    """The server has read the request, and may have begun to work on it."""
    async with Server(OK, OK, unanswered=2).serving() as server:
        assert await read(await ask(client, server)) == b"hello"
        with pytest.raises(IncompleteResponseError):
            await ask(client, server)
        assert (len(server.requests), server.connections) == (2, 1)


def answer_once(server: socket.socket) -> socket.socket:
    """Accept a connection, answer its first request, and return the connection."""
    connection, _ = server.accept()
    request = b""
    while not request.endswith(b"\r\n\r\n{}"):
        request += connection.recv(4096)
    connection.sendall(OK)
    return connection


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell which bytes were acknowledged")
@pytest.mark.parametrize("closed", ["before the request", "before it is read"])
async def test_request_is_resent_if_the_server_closed_the_connection_before_reading_the_request(
    client: Upstream, closed: str
) -> None:
    def close_after_the_next_request(connection: socket.socket) -> None:
        connection.recv(1, socket.MSG_PEEK)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        serving = asyncio.create_task(asyncio.to_thread(answer_once, server))
        assert await read(await client.ask(b"POST", url, "/v1/x", [], b"{}")) == b"hello"
        connection, closing = await serving, None
        if closed == "before the request":
            connection.close()  # the event loop runs next when the next request is written
        else:
            closing = asyncio.create_task(asyncio.to_thread(close_after_the_next_request, connection))
        serving = asyncio.create_task(asyncio.to_thread(answer_once, server))
        assert await read(await client.ask(b"POST", url, "/v1/x", [], b"{}")) == b"hello"
        (await serving).close()
        if closing is not None:
            await closing


async def test_server_certificate_of_the_configured_authority_is_trusted(tmp_path: Path) -> None:
    certificate, key = tmp_path / "ca.pem", tmp_path / "key.pem"
    create = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    await asyncio.to_thread(subprocess.run, [*create, *names], check=True, capture_output=True)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(certificate, key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server_context)
    async with server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        clients = Upstream(), Upstream(tls=client_context(certificate))
        with pytest.raises(ConnectError):
            await clients[0].ask(b"GET", url, "/", [])
        with pytest.raises(NodeError, match=f"the TLS certificate of {url} is not trusted"):
            await NodeClient(clients[0]).health(url)
        response = await clients[1].ask(b"GET", url, "/", [])
        assert await read(response) == b"hello"
        for client in clients:
            client.close()


@pytest.mark.parametrize(("text", "error"), [(None, "cannot be read"), ("nothing", "contains no PEM certificate")])
def test_unusable_ca_file_is_a_configuration_error(tmp_path: Path, text: str | None, error: str) -> None:
    if text is not None:
        (tmp_path / "ca.pem").write_text(text)
    (tmp_path / "cortex.toml").write_text('[gateway]\nca_file = "ca.pem"\n')
    with pytest.raises(ConfigError, match=error):
        load(tmp_path / "cortex.toml")


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not report that a connection was closed")
async def test_connection_closed_by_the_node_but_not_yet_reported_is_not_reused(
    client: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_client, "UNCHECKED_SECS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        for _ in range(2):
            serving = asyncio.create_task(asyncio.to_thread(answer_once, server))
            assert await read(await client.ask(b"POST", url, "/v1/x", [], b"{}")) == b"hello"
            (await serving).close()  # the event loop runs next when the next request is written


async def test_connection_with_unrequested_bytes_is_not_reused(client: Upstream) -> None:
    async with Server(OK + OK, OK).serving() as server:
        for _ in range(2):
            assert await read(await ask(client, server)) == b"hello"
        assert server.connections == 2


async def test_closing_a_response_early_closes_its_connection(client: Upstream) -> None:
    async with Server(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello").serving() as server:
        response = await ask(client, server)
        assert await response.chunk() == b"hello"
        response.close()
        await eventually(lambda: server.open == 0)


async def test_second_close_of_a_response_has_no_effect(client: Upstream) -> None:
    async with Server(OK, OK, OK).serving() as server:
        first = await ask(client, server)
        assert await read(first) == b"hello"
        first.close()
        second = await ask(client, server)
        first.close()  # the second response uses the connection now
        third = await ask(client, server)
        assert [await read(second), await read(third)] == [b"hello", b"hello"]
        assert server.connections == 2


async def test_canceled_request_closes_its_connection(client: Upstream) -> None:
    async with Server(b"").serving() as server:
        ask_task = asyncio.create_task(ask(client, server))
        await eventually(lambda: server.requests)
        ask_task.cancel()
        await asyncio.wait((ask_task,))
        await eventually(lambda: server.open == 0)


async def test_response_body_that_is_not_read_is_not_buffered(client: Upstream) -> None:
    size = 24 << 20
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16
        writer.close()

    async with await asyncio.start_server(flood, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        response = await client.ask(b"POST", url, "/", [], b"")
        previous_sent = -1
        while sent != previous_sent:  # until the server can send no more
            previous_sent = sent
            await asyncio.sleep(0.05)
        assert sent < size // 2
        assert len(await read(response)) == size


@settings(max_examples=40, deadline=None)
@given(body=st.binary(max_size=300), size=st.integers(1, 50), chunked=st.booleans())
def test_any_response_body_arrives_at_any_chunk_size(body: bytes, size: int, chunked: bool) -> None:
    if chunked:
        chunks = [body[i : i + size] for i in range(0, len(body), size)]
        coded = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in chunks) + b"0\r\n\r\n"
        response_bytes = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + coded
    else:
        response_bytes = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    async def request_once() -> bytes:
        client = Upstream()
        async with Server(response_bytes, write_size=size).serving() as server:
            try:
                return await read(await ask(client, server))
            finally:
                client.close()

    assert asyncio.run(request_once()) == body


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("http://h:1", "h:1", ""),
        ("http://h/p", "h", "/p"),
        ("https://h", "h", ""),
        ("https://h:80/", "h:80", "/"),
        ("http://[::1]:2/x", "[::1]:2", "/x"),
    ],
)
def test_base_url_of_a_node_is_split_into_authority_and_path(url: str, authority: str, path: str) -> None:
    origin, prefix = parse_base(url)
    assert (origin.authority, prefix) == (authority, path)
