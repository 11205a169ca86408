"""The data path's HTTP client against servers that say exactly these bytes."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cortex.running import eventually
from helexa.cortex.upstream import client as upstream_client
from helexa.cortex.upstream.client import Upstream
from helexa.cortex.upstream.connection import Answer
from helexa.cortex.upstream.errors import BrokenOff, NotReached, Silent
from helexa.cortex.upstream.origin import parse_base

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


class Server:
    """Answers each request with the next of `answers`, and keeps what it was asked.

    Request number `unanswered` ends its connection.
    """

    def __init__(self, *answers: bytes, close: bool = False, pieces: int = 0, unanswered: int = 0) -> None:
        self.answers = list(answers)
        self.close = close
        self.pieces = pieces
        self.unanswered = unanswered
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                if len(self.requests) == self.unanswered:
                    return
                answer = self.answers.pop(0)
                for start in range(0, len(answer), self.pieces or len(answer) or 1):
                    writer.write(answer[start : start + (self.pieces or len(answer))])
                    await writer.drain()
                    if self.pieces:
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


async def ask(client: Upstream, server: Server, body: bytes = b"{}") -> Answer:
    return await client.ask(b"POST", server.url, "/v1/x", [(b"x-a", b"1")], body)


async def read(answer: Answer) -> bytes:
    body = b""
    while chunk := await answer.chunk():
        body += chunk
    answer.close()
    return body


@pytest.mark.parametrize("pieces", [0, 1, 7])
@pytest.mark.parametrize(
    "answer", [OK, CHUNKED, *(b"HTTP/1.1 %d\r\nx-early: 1\r\n\r\n" % n * 3 + OK for n in (100, 102))]
)
async def test_an_answer_arrives_however_it_is_cut_and_the_connection_is_used_again(
    client: Upstream, answer: bytes, pieces: int
) -> None:
    async with Server(answer, answer, pieces=pieces).serving() as server:
        for _ in range(2):
            got = await ask(client, server, b"body")
            assert got.status == 200
            assert b"x-early" not in dict(got.headers)
            assert await read(got) == b"hello"
        assert server.connections == 1
        host = server.url.split("/")[2].encode()
        expected = b"POST /base/v1/x HTTP/1.1\r\nhost: %s\r\nx-a: 1\r\ncontent-length: 4\r\n\r\nbody" % host
        assert server.requests == [expected] * 2


async def test_a_body_without_a_length_ends_with_the_connection(client: Upstream) -> None:
    async with Server(b"HTTP/1.1 200 OK\r\n\r\nhello", close=True).serving() as server:
        assert await read(await ask(client, server)) == b"hello"


async def test_a_large_body_is_sent_whole(client: Upstream) -> None:
    body = bytes(range(256)) * (8 << 10)
    async with Server(OK).serving() as server:
        assert await read(await ask(client, server, body)) == b"hello"
        assert server.requests[0].endswith(body)


async def test_nobody_listens(client: Upstream) -> None:
    async with Server().serving() as server:
        pass
    with pytest.raises(NotReached):
        await ask(client, server)


@pytest.mark.parametrize(
    "answer",
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
async def test_what_is_no_answer_is_an_error_before_it_begins(client: Upstream, answer: bytes) -> None:
    async with Server(answer, close=True).serving() as server:
        with pytest.raises(BrokenOff):
            await ask(client, server)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n",
    ],
)
async def test_a_body_that_breaks_off_is_an_error_after_what_came(client: Upstream, answer: bytes) -> None:
    async with Server(answer, close=True).serving() as server:
        got = await ask(client, server)
        with pytest.raises(BrokenOff):
            await read(got)
        got.close()


async def test_silence_is_told_from_an_end(client: Upstream) -> None:
    client.idle_timeout_secs = 0.05
    async with Server(b"").serving() as server:
        with pytest.raises(Silent):
            await ask(client, server)
    async with Server(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello").serving() as server:
        got = await ask(client, server)
        assert await got.chunk() == b"hello"
        with pytest.raises(Silent):
            await got.chunk()


async def test_the_answer_timeout_holds_on_a_connection_whose_alarm_is_set_for_later(client: Upstream) -> None:
    async with Server(OK, b"").serving() as server, asyncio.timeout(30):
        assert await read(await ask(client, server)) == b"hello"
        client.answer_timeout_secs = 0.05
        with pytest.raises(Silent):
            await client.ask(b"POST", server.url, "/", [], b"", lives=lambda: True)
        assert server.connections == 1


async def test_the_kernel_probes_idle_connections(client: Upstream) -> None:
    async with Server(OK).serving() as server:
        got = await ask(client, server)
        port = int(server.url.split(":")[2].split("/")[0])

        def probed() -> bool:
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                _, _, remote, state, _, timer, *_ = line.split()
                if int(remote.split(":")[1], 16) == port and state == "01":
                    return timer.startswith("02")  # the keep-alive timer runs
            return False

        await eventually(probed)
        got.close()


async def test_a_kept_connection_that_was_closed_meanwhile_costs_nothing(
    client: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_client, "UNCHECKED_SECS", 0.0)
    async with Server(OK, OK, close=True).serving() as server:
        for _ in range(2):
            assert await read(await ask(client, server)) == b"hello"
            await eventually(lambda: server.open == 0)
        assert server.connections == 2


async def test_post_that_a_kept_connection_may_have_delivered_is_not_sent_again(client: Upstream) -> None:
    async with Server(OK, OK, unanswered=2).serving() as server:
        assert await read(await ask(client, server)) == b"hello"
        with pytest.raises(BrokenOff):
            await ask(client, server)
        assert (len(server.requests), server.connections) == (2, 1)


@pytest.mark.parametrize(("method", "repeatable"), [(b"GET", False), (b"POST", True)])
async def test_harmless_request_is_sent_again_when_its_kept_connection_ends(
    client: Upstream, method: bytes, repeatable: bool
) -> None:
    async with Server(OK, OK, unanswered=2).serving() as server:
        assert await read(await ask(client, server)) == b"hello"
        assert await read(await client.ask(method, server.url, "/v1/x", [], repeatable=repeatable)) == b"hello"
        assert (len(server.requests), server.connections) == (3, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell that a connection was closed")
async def test_connection_that_the_event_loop_does_not_know_to_be_closed_is_not_used(
    client: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_client, "UNCHECKED_SECS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_one() -> socket.socket:
            connection, _ = server.accept()
            request = b""
            while not request.endswith(b"\r\n\r\n{}"):
                request += connection.recv(4096)
            connection.sendall(OK)
            return connection

        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        for _ in range(2):
            serving = asyncio.create_task(asyncio.to_thread(answer_one))
            assert await read(await client.ask(b"POST", url, "/v1/x", [], b"{}")) == b"hello"
            (await serving).close()  # the event loop runs next when the next request is written


async def test_bytes_that_nobody_asked_for_end_the_connection(client: Upstream) -> None:
    async with Server(OK + OK, OK).serving() as server:
        for _ in range(2):
            assert await read(await ask(client, server)) == b"hello"
        assert server.connections == 2


async def test_an_answer_that_is_let_go_early_closes_the_connection(client: Upstream) -> None:
    async with Server(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello").serving() as server:
        got = await ask(client, server)
        assert await got.chunk() == b"hello"
        got.close()
        await eventually(lambda: server.open == 0)


async def test_a_request_that_is_cancelled_closes_the_connection(client: Upstream) -> None:
    async with Server(b"").serving() as server:
        asking = asyncio.create_task(ask(client, server))
        await eventually(lambda: server.requests)
        asking.cancel()
        await asyncio.wait((asking,))
        await eventually(lambda: server.open == 0)


async def test_what_nobody_reads_is_not_held(client: Upstream) -> None:
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
        got = await client.ask(b"POST", url, "/", [], b"")
        before = -1
        while sent != before:  # until the server can send no more
            before = sent
            await asyncio.sleep(0.05)
        assert sent < size // 2
        assert len(await read(got)) == size


@settings(max_examples=40, deadline=None)
@given(body=st.binary(max_size=300), size=st.integers(1, 50), chunked=st.booleans())
def test_any_body_in_any_pieces(body: bytes, size: int, chunked: bool) -> None:
    if chunked:
        parts = [body[i : i + size] for i in range(0, len(body), size)]
        coded = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + coded
    else:
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)

    async def once() -> bytes:
        client = Upstream()
        async with Server(answer, pieces=size).serving() as server:
            try:
                return await read(await ask(client, server))
            finally:
                client.close()

    assert asyncio.run(once()) == body


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
def test_base_urls(url: str, authority: str, path: str) -> None:
    origin, prefix = parse_base(url)
    assert (origin.authority, prefix) == (authority, path)
