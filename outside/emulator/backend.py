"""The emulated backend: an HTTP server with one model for each quirk."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from emulator.quirk import Quirk


class Backend:
    """An HTTP server on a real socket. A request for the model `name` is answered with the quirk `name`.

    Args:
        quirks: the quirks by model name.

    Attributes:
        url: base URL of the server.
        bodies: the bodies of all generation requests.
    """

    def __init__(self, quirks: dict[str, Quirk]) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self._quirks = quirks

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Backend"]:
        """Serve requests during the `async with` block."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 24)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request, and return whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, _ = head.split(" ", 2)
        lengths = [line.partition(":")[2] for line in head.lower().split("\r\n") if line.startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        if (method, path) == ("GET", "/v1/models"):
            entries = [{"id": name, "object": "model"} for name in self._quirks]
            await _send(writer, 200, "application/json", [json.dumps({"object": "list", "data": entries}).encode()])
            return True
        if (method, path) != ("POST", "/v1/chat/completions"):
            await _send(writer, 404, "application/json", [b'{"detail":"Not Found"}'])
            return True
        request = json.loads(body)
        self.bodies.append(request)
        quirk = self._quirks[request["model"]]
        streamed = bool(request.get("stream"))
        pieces = quirk.stream if streamed else (quirk.whole or b"",)
        media_type = quirk.media_type
        if media_type is None:
            media_type = "text/event-stream" if streamed else "application/json"
        await _send(writer, quirk.status, media_type, pieces, breaks=quirk.breaks)
        return not quirk.breaks


async def _send(
    writer: asyncio.StreamWriter, status: int, media_type: str, pieces: Sequence[bytes], *, breaks: bool = False
) -> None:
    """Send a response with one HTTP chunk for each piece. If `breaks`, the last chunk of HTTP is missing."""
    kind = f"Content-Type: {media_type}\r\n" if media_type else ""
    writer.write(f"HTTP/1.1 {status} OK\r\n{kind}Transfer-Encoding: chunked\r\n\r\n".encode())
    for piece in pieces:
        if piece:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
    if not breaks:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
