"""The connection to the editor: JSON lines over stdin and stdout of this process."""

import asyncio
import contextlib
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from helexa.acp.json_line import encode
from helexa.acp.protocol.rejection import invalid_request, parse_error

MAX_LINE_BYTES = 64 << 20
_CHUNK = 1 << 16
_WAITING_CHUNKS = 64


class StdioTransport:
    """The connection to the editor over stdin and stdout of this process.

    The transport also redirects the process's standard streams. Output that libraries print goes to stderr, and child
    processes read from /dev/null. Reads from stdin and writes to stdout may block, so threads perform them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._input, self._output = os.dup(0), os.dup(1)
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor is needed
            os.dup2(nothing.fileno(), 0)
        sys.stdout.flush()
        os.dup2(2, 1)
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue(_WAITING_CHUNKS)
        self._buffer = bytearray()
        self._searched = 0
        self._skipping = False
        self._writer = ThreadPoolExecutor(1, "acp-stdout")
        threading.Thread(target=self._read, name="acp-stdin", daemon=True).start()

    async def receive(self) -> Any:
        """Return the next message from stdin as parsed JSON, or None if the editor has closed stdin."""
        while (line := await self._line()) is not None:
            if not line.strip():
                continue
            try:
                message = msgspec.json.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                await self.send({"jsonrpc": "2.0", "id": None, "error": parse_error().body()})
                continue
            if message is not None:
                return message
        return None

    async def send(self, message: dict[str, Any]) -> None:
        """Write a message to stdout as one JSON line, and wait until all bytes are written.

        Raises:
            ConnectionError: the editor has closed stdout.
        """
        await self._loop.run_in_executor(self._writer, self._write, encode(message))

    async def close(self) -> None:
        """Stop writing to stdout. The thread that reads stdin runs until the process ends."""
        self._writer.shutdown(wait=False)

    async def _line(self) -> bytes | None:
        while True:
            end = self._buffer.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self._searched = 0
                if not self._skipping:
                    return line
                self._skipping = False
                await self._reject_long_line()
                continue
            self._searched = len(self._buffer)
            if self._searched > MAX_LINE_BYTES:
                self._skipping = True
            if self._skipping:
                self._buffer.clear()
                self._searched = 0
            chunk = await self._chunks.get()
            if not chunk:
                line = bytes(self._buffer)
                self._buffer.clear()
                self._chunks.put_nowait(b"")
                return line or None
            self._buffer += chunk

    async def _reject_long_line(self) -> None:
        reason = f"a message is longer than {MAX_LINE_BYTES} bytes"
        await self.send({"jsonrpc": "2.0", "id": None, "error": invalid_request(reason).body()})

    def _read(self) -> None:
        # Runs in a thread. Unlike reads of sys.stdin, os.read holds no lock that the interpreter needs at exit.
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            chunk = b"-"
            while chunk:
                try:
                    chunk = os.read(self._input, _CHUNK)
                except OSError:
                    chunk = b""
                asyncio.run_coroutine_threadsafe(self._chunks.put(chunk), self._loop).result()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._output, view) :]
        except OSError as error:
            raise ConnectionError(f"the client reads no more: {error.strerror}") from None
