"""Raw HTTP/1.1 requests, including malformed ones that HTTP clients cannot send."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from cortex.running_gateway import Cortex

BODY = b'{"model":"Org/M","messages":[]}'
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
JSON = b"Content-Type: application/json"
LINE = b"POST /v1/chat/completions HTTP/1.1"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n%s\r\n"


def post(*headers: bytes, line: bytes = LINE, host: bytes | None = b"localhost", body: bytes = BODY) -> bytes:
    """Return a request whose Content-Length is that of `BODY`, even if `body` differs."""
    host_lines = [] if host is None else [b"Host: " + host]
    length = b"Content-Length: %d" % len(BODY)
    return b"\r\n".join([line, *host_lines, JSON, length, *headers, b"", body])


def chunked(body: bytes = CHUNKED, coding: bytes = b"chunked", *headers: bytes, line: bytes = LINE) -> bytes:
    return b"\r\n".join([line, b"Host: localhost", JSON, b"Transfer-Encoding: " + coding, *headers, b"", body])


@asynccontextmanager
async def connected(cortex: Cortex) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(cortex.url.rpartition(":")[2]))
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):  # the gateway may have closed the connection
            await writer.wait_closed()


async def read_response(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes], bytes]:
    """Read a response with a Content-Length; return its status, headers and body."""
    line, *lines = (await reader.readuntil(b"\r\n\r\n")).rstrip().split(b"\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
    return int(line.split()[1]), headers, await reader.readexactly(int(headers.get(b"content-length", b"0")))
