"""Malformed and unusual requests over raw sockets are rejected, or served and forwarded correctly."""

import asyncio
import json
import random

import pytest

from cortex.fake_node import FakeNode
from cortex.raw_http import BODY, CHUNKED, GET, JSON, LINE, chunked, connected, post, read_response
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.http import connection_and_timeouts, request_cycle_and_disconnects

REJECTED = {
    "Content-Length, then Transfer-Encoding": post(b"Transfer-Encoding: chunked", body=CHUNKED),
    "Transfer-Encoding, then Content-Length": chunked(CHUNKED, b"chunked", b"Content-Length: 4"),
    "a length twice": post(b"Content-Length: %d" % len(BODY)),
    "two lengths": post(b"Content-Length: 3"),
    "a list of lengths": LINE + b"\r\nHost: localhost\r\nContent-Length: 31, 31\r\n\r\n" + BODY,
    "a signed length": LINE + b"\r\nHost: localhost\r\nContent-Length: +31\r\n\r\n" + BODY,
    "a negative length": LINE + b"\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n" + BODY,
    "a length above 64 bits": LINE + b"\r\nHost: localhost\r\nContent-Length: 1" + b"0" * 30 + b"\r\n\r\n" + BODY,
    "a length with a space": LINE + b"\r\nHost: localhost\r\nContent-Length: 3 1\r\n\r\n" + BODY,
    "a folded header": post(b"X-A: b\r\n c"),
    "lines without CR": post().replace(b"\r\n", b"\n"),
    "one line without CR": post(b"X-A: b\nX-B: c"),
    "one line without LF": post(b"X-A: b\rX-B: c"),
    "space before a colon": post(b"X-A : b"),
    "space before the colon of a coding": post(b"Transfer-Encoding : chunked"),
    "NUL in a value": post(b"X-A: b\0c"),
    "NUL in a name": post(b"X-\0A: b"),
    "a control character in a value": post(b"X-A: b\x01\x7f"),
    "non-ASCII in a name": post("X-é: b".encode()),
    "an empty name": post(b": b"),
    "a parenthesis in a name": post(b"X(A): b"),
    "a control character in the path": post(line=b"POST /v1/\x01chat HTTP/1.1"),
    "NUL in the path": post(line=b"POST /v1/\0chat HTTP/1.1"),
    "non-ASCII in the path": post(line="POST /v1/é HTTP/1.1".encode()),
    "an authority as target": post(line=b"POST localhost:80 HTTP/1.1"),
    "CONNECT": post(line=b"CONNECT localhost:80 HTTP/1.1"),
    "a target of another scheme": post(line=b"POST ftp://localhost/v1/chat/completions HTTP/1.1"),
    "a target with credentials": post(line=b"POST http://localhost@evil.example/v1/chat/completions HTTP/1.1"),
    "a target with an empty host": post(line=b"POST http:///v1/chat/completions HTTP/1.1"),
    "an unknown method": post(line=b"FOO /v1/chat/completions HTTP/1.1"),
    "a lower-case method": post(line=b"post /v1/chat/completions HTTP/1.1"),
    "chunked, then identity": chunked(coding=b"chunked, identity"),
    "identity": chunked(coding=b"identity"),
    "gzip, then chunked": chunked(coding=b"gzip, chunked"),
    "an empty coding": chunked(coding=b""),
    "almost chunked": chunked(coding=b"xchunked"),
    "chunked in quotes": chunked(coding=b'"chunked"'),
    "chunked behind a vertical tab": chunked(coding=b"\x0bchunked"),
    "chunked twice": chunked(coding=b"chunked, chunked"),
    "two codings": chunked(CHUNKED, b"chunked", b"Transfer-Encoding: chunked"),
    "chunked in HTTP/1.0": chunked(line=b"POST /v1/chat/completions HTTP/1.0"),
    "a chunk size above 64 bits": chunked(b"f" * 18 + b"\r\n"),
    "a negative chunk": chunked(b"-1\r\n"),
    "a chunk size with 0x": chunked(b"0x1f\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunks without CR": chunked(CHUNKED.replace(b"\r\n", b"\n")),
    "an extension without CR": chunked(b"%x;a\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "space after a chunk size": chunked(b"%x \r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "a chunk longer than its size": chunked(b"%x\r\n%sXX\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "a body longer than its length": post(body=BODY + b"garbage \r\n\r\n"),
    "no host": post(host=None),
    "two hosts": post(b"Host: localhost"),
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/1.2": post(line=b"POST /v1/chat/completions HTTP/1.2"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "TLS": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(100),
    "SMTP": b"EHLO x\r\n",
    "10,000 headers": post(*(b"X-%d: a" % number for number in range(10_000))),
    "101 headers": post(*(b"X-%d: a" % number for number in range(99))),
    "one large header": post(b"X-A: " + b"a" * (33 << 10)),
}

UPGRADE = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
ACCEPTED = {
    "a plain request": post(),
    "chunked": chunked(),
    "CHUNKED": chunked(coding=b"CHUNKED"),
    "chunks of one byte": chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"),
    "extensions": chunked(b'%x;a=b;c="d"\r\n%s\r\n0;e\r\n\r\n' % (len(BODY), BODY)),
    "trailers": chunked(CHUNKED[:-2] + b"Host: x\r\nAuthorization: Bearer x\r\nX-Trailer: x\r\n\r\n"),
    "a target with its host": post(line=b"POST http://localhost/v1/chat/completions HTTP/1.1", host=b"evil.example"),
    "an encoded path": post(line=b"POST /v1/chat%2Fcompletions?a=b HTTP/1.1"),
    "leading empty lines": b"\r\n\r\n" + post(),
    "HTTP/1.0": post(line=b"POST /v1/chat/completions HTTP/1.0", host=None),
    "an unknown expectation": post(b"Expect: wonders"),
    "an upgrade": post(*UPGRADE),
    "an upgrade of chunks": chunked(CHUNKED, b"chunked", *UPGRADE),
    "a WebSocket upgrade": post(b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x"),
    "100 headers": post(*(b"X-%d: a" % number for number in range(97))),
}

NOT_FOUND = {
    "OPTIONS *": b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "line breaks in the path": post(line=b"POST /v1/chat/completions%0d%0aX-A:%20b HTTP/1.1"),
    "invalid UTF-8 in the path": post(line=b"POST /v1/chat/%ff HTTP/1.1"),
    "a path with ..": post(line=b"POST /v1/x/../chat/completions HTTP/1.1"),
    "an empty path segment": post(line=b"POST //v1/chat/completions HTTP/1.1"),
}


async def test_malformed_http_requests_are_rejected_without_reaching_the_node(cortex: Cortex, node: FakeNode) -> None:
    for name, request in REJECTED.items():
        async with connected(cortex) as (reader, writer):
            writer.write(request)
            status, headers, body = await read_response(reader)
            large = "headers" in name or "large" in name
            expected = (431, "request_head_too_large") if large else (400, "malformed_http")
            assert (status, json.loads(body)["error"]["code"]) == expected, name
            assert (headers[b"connection"], headers[b"content-type"]) == (b"close", b"application/json"), name
            assert await reader.read() == b"", name
    assert (node.bodies, node.loads) == ([], [])
    assert (await cortex.ask())[0] == 200


async def test_unusual_but_valid_http_requests_are_served(cortex: Cortex, node: FakeNode) -> None:
    for name, request in ACCEPTED.items():
        async with connected(cortex) as (reader, writer):
            node.bodies.clear()
            writer.write(request)
            assert (await read_response(reader))[0] == 200, name
            if name == "HTTP/1.0":
                assert await reader.read() == b""
            else:
                writer.write(request)
                assert (await read_response(reader))[0] == 200, name
            assert node.bodies == [BODY] * (1 if name == "HTTP/1.0" else 2), name
            assert not node.headers[-1].keys() & {"x-trailer", "authorization", "upgrade", "http2-settings", "te"}, name


async def test_unusual_request_paths_are_404(cortex: Cortex, node: FakeNode) -> None:
    for name, request in NOT_FOUND.items():
        async with connected(cortex) as (reader, writer):
            writer.write(request)
            assert (await read_response(reader))[0] == 404, name
            writer.write(post())
            assert (await read_response(reader))[0] == 200, name
    assert node.bodies == [BODY] * len(NOT_FOUND)


async def test_request_forwarded_to_a_node_has_only_safe_headers(cortex: Cortex, node: FakeNode) -> None:
    odd = b"X!#$%&'*+-.^_`|~9"
    hostile = post(
        b"Content-Type: application/json",
        b"Connection: keep-alive, X-Gone",
        b"X-Gone: 1",
        odd + b": \xff\xc3\xa9 \tb\t ",
        b"X-Helexa-Account-Id: root",
        b"x-HELEXA-anything: 1",
        b"X-Request-Id: a b",
        b"TE: trailers",
        b"Proxy-Authorization: Basic x",
        b"Cookie: a=b",
        b"Authorization: Bearer x",
        b"X-Api-Key: x",
        b"Accept-Encoding: gzip",
        b"Expect: 200-ok",
    )
    async with connected(cortex) as (reader, writer):
        writer.write(hostile)
        assert (await read_response(reader))[0] == 200
    (node_headers,) = node.headers
    assert node_headers.pop("x-request-id").isalnum()
    assert node_headers.pop("x-helexa-keep-alive").startswith("15; from=127.0.0.1:")
    assert node_headers == {
        "host": node.url.removeprefix("http://"),
        "content-length": str(len(BODY)),
        "content-type": "application/json",
        odd.decode().lower(): b"\xff\xc3\xa9 \tb".decode("utf-8", "surrogateescape"),
    }
    assert node.bodies == [BODY]


async def test_pipelined_requests_are_not_confused_with_body_contents(cortex: Cortex, node: FakeNode) -> None:
    """A request inside a JSON body, and requests after a body, are not confused with that body."""
    inner = b'{"model":"Org/M","x":%s}' % json.dumps(post().decode()).encode()
    outer = b"%s\r\nHost: localhost\r\n%s\r\nContent-Length: %d\r\n\r\n%s" % (LINE, JSON, len(inner), inner)
    async with connected(cortex) as (reader, writer):
        writer.write(outer + post(b"X-Request-Id: second") + GET % b"" + chunked(CHUNKED, b"chunked", *UPGRADE))
        responses = [await read_response(reader) for _ in range(4)]
    assert [status for status, _, _ in responses] == [200] * 4
    assert responses[1][1][b"x-request-id"] == b"second"
    assert node.bodies == [inner, BODY, BODY]


async def test_requests_for_a_protocol_upgrade_are_answered_as_ordinary_requests(cortex: Cortex) -> None:
    async with connected(cortex) as (reader, writer):
        writer.write((GET % (b"\r\n".join(UPGRADE) + b"\r\n")) * 300)
        for _ in range(300):
            assert (await read_response(reader))[0] == 200


async def test_response_100_continue_is_sent_unless_the_body_is_too_large(cortex: Cortex, node: FakeNode) -> None:
    async with connected(cortex) as (reader, writer):
        writer.write(post(b"Expect: 100-continue", body=b""))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert (await read_response(reader))[0] == 200
        too_much = b"Host: localhost\r\nExpect: 100-continue\r\nContent-Length: 2097153\r\n\r\n"
        writer.write(LINE + b"\r\n" + JSON + b"\r\n" + too_much)
        status, _, body = await read_response(reader)  # without a 100 Continue
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
    assert node.bodies == [BODY]


async def test_host_in_an_absolute_request_target_is_checked(cortex: Cortex, node: FakeNode) -> None:
    for line in (b"GET http://evil.example/health HTTP/1.1", b"GET HTTP://evil.example:80?a=b HTTP/1.1"):
        async with connected(cortex) as (reader, writer):
            writer.write(post(line=line, body=BODY))
            status, _, body = await read_response(reader)
        assert (status, json.loads(body)["error"]["code"]) == (403, "host_not_allowed")


EARLY = {
    401: post(b"Expect: 100-continue", b"Authorization: Bearer wrong", body=b""),
    404: post(b"Expect: 100-continue", line=b"POST /v1/nothing HTTP/1.1", body=b""),
    415: post(b"Expect: 100-continue", b"Authorization: Bearer k", b"Content-Encoding: br", body=b""),
}


@pytest.mark.parametrize("expected", EARLY)
async def test_error_response_sent_instead_of_100_continue_closes_the_connection(node: FakeNode, expected: int) -> None:
    settings = {"entitlements": {"require_auth": True, "keys": [{"key": "k", "account_id": "a"}]}}
    async with running_cortex(node, settings=settings) as cortex, connected(cortex) as (reader, writer):
        writer.write(EARLY[expected])
        status, headers, _ = await read_response(reader)
        assert (status, headers[b"connection"]) == (expected, b"close")
        writer.write(GET % b"")
        assert await reader.read() == b""


async def test_randomly_mutated_requests_reach_the_node_unchanged_or_not_at_all(
    cortex: Cortex, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace, duplicate and drop random bytes of request heads.

    The node must receive each body unchanged and at most once.
    """
    monkeypatch.setattr(connection_and_timeouts, "HEAD_SECS", 0.1)
    monkeypatch.setattr(request_cycle_and_disconnects, "BODY_SECS", 0.1)
    dice = random.Random(5)
    marks = [b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b"\0", b"\xff", b"0", b",", b";", b"chunked", b"\r\n\r\n", b"/"]

    def mutated(number: int) -> tuple[bytes, bytes]:
        body = b'{"model":"Org/M","number":%d}' % number
        head = post(b"X-A: b", b"Accept: */*", b"Connection: close", body=b"")
        head = head.replace(b"%d" % len(BODY), b"%d" % len(body))
        for _ in range(dice.choice((1, 1, 2, 5))):
            at = dice.randrange(len(head))
            head = head[:at] + dice.choice(marks) + head[at + dice.choice((0, 0, 1, 2)) :]
        return body, head + body

    async def send(request: bytes) -> int:
        async with connected(cortex) as (reader, writer):
            writer.write(request)
            try:
                return (await read_response(reader))[0]
            except (asyncio.IncompleteReadError, ConnectionError):
                return 0  # closed without a response

    requests = [mutated(number) for number in range(400)]
    sent = {body for body, _ in requests}
    for at in range(0, len(requests), 20):
        statuses = await asyncio.gather(*(send(request) for _, request in requests[at : at + 20]))
        assert set(statuses) <= {0, 200, 400, 403, 404, 405, 408, 415, 422, 431}
    assert 10 < len(node.bodies) < 400
    assert len(set(node.bodies)) == len(node.bodies)
    assert set(node.bodies) <= sent
    assert node.loads == []
    await eventually(lambda: not cortex.gateway.fleet.view().in_flight)
    assert (await cortex.ask())[0] == 200
