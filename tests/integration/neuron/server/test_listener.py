"""The node's HTTP listener over raw sockets: malformed requests and timeouts."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cortex.raw_http import CHUNKED, GET, chunked, post, read_response
from helexa.http import connection_and_timeouts, request_cycle_and_disconnects
from helexa.http.listener import Listener, bind
from helexa.neuron.app import NodeConnection, create_app
from helexa.neuron.config import read_config

JSON = b"Content-Type: application/json"
REJECTED_REQUESTS = {
    "length and coding": post(b"Transfer-Encoding: chunked", body=CHUNKED),
    "two lengths": post(b"Content-Length: 3"),
    "a folded header": post(b"X-A: b\r\n c"),
    "gzip, then chunked": chunked(coding=b"gzip, chunked"),
    "two hosts": post(b"Host: elsewhere"),
    "CONNECT": post(line=b"CONNECT localhost:80 HTTP/1.1"),
}


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    listener, bound = Listener(create_app(read_config(None, {})), connection=NodeConnection), bind(("127.0.0.1", 0))
    serving = asyncio.create_task(listener.serve(bound))
    reader, writer = await asyncio.open_connection(*bound.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        listener.should_exit = True
        await serving


async def read_error(reader: asyncio.StreamReader) -> tuple[int, str]:
    status, _, content = await read_response(reader)
    return status, json.loads(content)["error"]["code"]


@pytest.mark.parametrize("request_bytes", REJECTED_REQUESTS.values(), ids=REJECTED_REQUESTS)
async def test_ambiguous_http_request_is_rejected_with_a_json_error(request_bytes: bytes) -> None:
    async with connected() as (reader, writer):
        writer.write(request_bytes)
        assert await read_error(reader) == (400, "malformed_http")
        assert await reader.read() == b""


async def test_limit_of_request_headers_leaves_space_for_headers_that_a_gateway_adds() -> None:
    headers = b"".join(b"X-%d: a\r\n" % number for number in range(NodeConnection.max_headers - 2))
    async with connected() as (reader, writer):
        writer.write(GET % headers)
        assert (await read_response(reader))[0] == 200
        writer.write(GET % (headers + b"X-A: b\r\nX-B: c\r\n"))
        assert await read_error(reader) == (431, "request_head_too_large")


async def test_connection_that_sends_no_request_is_closed_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_and_timeouts, "HEAD_SECS", 0.05)
    async with connected() as (reader, _):
        assert await reader.read() == b""


async def test_request_whose_body_stalls_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_cycle_and_disconnects, "BODY_SECS", 0.05)
    async with connected() as (reader, writer):
        writer.write(post(JSON)[:-5])
        assert await read_error(reader) == (408, "request_timeout")


async def test_compressed_body_is_decoded_and_other_encodings_are_rejected() -> None:
    compressed = gzip.compress(b'{"model": "org/none", "prompt": "hi"}')
    line = b"POST /v1/completions HTTP/1.1"
    async with connected() as (reader, writer):
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(compressed), compressed)
        writer.write(chunked(body, b"chunked", b"Content-Encoding: gzip", line=line))
        assert await read_error(reader) == (404, "model_not_found")
        writer.write(post(JSON, b"Content-Encoding: br", line=line))
        status, headers, _ = await read_response(reader)
        assert status == 415
        assert b"gzip, deflate" in headers[b"accept-encoding"]


def test_host_name_with_ipv4_and_ipv6_addresses_is_bound_to_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [(kind, socket.SOCK_STREAM, 6, "", ()) for kind in (socket.AF_INET6, socket.AF_INET)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
    with bind(("localhost", 0)) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"
