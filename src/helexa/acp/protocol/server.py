"""Serves one editor over stdin and stdout: handshake, requests, shutdown."""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from helexa.acp.config import ConfigError, Settings
from helexa.acp.conversation_and_events import encode
from helexa.acp.protocol.capabilities import AUTH_METHOD, ClientCapabilities, initialize_result, read_capabilities
from helexa.acp.protocol.editor_requests_and_always_allow import EditorClient
from helexa.acp.protocol.json_rpc import (
    Message,
    RpcError,
    Transport,
    ValidatingTransport,
    auth_required,
    internal_error,
    invalid_params,
    invalid_request,
    method_not_found,
    parse_error,
)
from helexa.acp.protocol.request_handlers import Agent

logger = logging.getLogger(__name__)

Result = dict[str, Any]
MAX_LINE_BYTES = 64 << 20
_CHUNK = 1 << 16
_WAITING_CHUNKS = 64


async def serve(load: Callable[[], Settings], transport: Transport) -> None:
    """Handle the requests of the editor until it disconnects.

    The response to the first `initialize` request is sent before the ACP SDK is imported. The editor waits for this
    response, and the import takes most of the start time.

    Args:
        load: function that reads the configuration. If the function raises ConfigError, session requests are rejected
            until the configuration is corrected.
        transport: connection to the editor.
    """
    wrapped = ValidatingTransport(transport)
    server = Server(load, wrapped)
    try:
        message = await wrapped.receive()
        if message is not None and message["method"] == "initialize" and "id" in message:
            await wrapped.send(server.first_response(message))
        elif message is not None:
            wrapped.unread(message)
        await server.run()
    finally:
        await server.close()
        await wrapped.close()


class Server:
    """Handles all requests of the editor.

    Every error is sent to the editor as a JSON-RPC error response.
    """

    def __init__(self, load: Callable[[], Settings], wrapped: ValidatingTransport) -> None:
        self._load = load
        self._transport = wrapped
        self._capabilities = ClientCapabilities()
        self._signed_in = True
        self._agent: Agent | None = None

    def first_response(self, message: Message) -> Message:
        """Return the response to an `initialize` request, without importing the ACP SDK."""
        response = {"jsonrpc": "2.0", "id": message["id"]}
        try:
            return response | {"result": self._initialize(message.get("params") or {})}
        except RpcError as error:
            return response | {"error": error.body()}

    async def run(self) -> None:
        """Handle the editor's messages until it disconnects."""
        from acp.connection import Connection

        self._connection = Connection(self._handle, self._transport, listening=False)
        try:
            self._configured()
        except RpcError as error:
            logger.error(
                "prompts cannot be answered error=%r; the next request reads the configuration again", error.message
            )
        await self._connection.main_loop()

    async def close(self) -> None:
        """Close all sessions."""
        if self._agent is not None:
            await self._agent.close()

    async def _handle(self, method: str, params: Any, is_notification: bool) -> Result | None:
        from acp.exceptions import RequestError

        try:
            return await self._transport.handled(lambda: self._dispatch(method, params or {}))
        except RpcError as error:
            if is_notification:
                logger.info("notification rejected method=%r error=%r", method[:100], error.message)
                return None
            raise RequestError(error.code, error.message, error.data) from None
        except Exception:
            logger.exception(
                "request failed with an internal error method=%r; the editor got an error response", method[:100]
            )
            error = internal_error(f"Internal error in {method[:100]}; see the log of helexa-acp")
            raise RequestError(error.code, error.message) from None

    async def _dispatch(self, method: str, params: Result) -> Result:
        match method:
            case "initialize":
                return self._initialize(params)
            case "authenticate":
                return await self._authenticate(params)
            case "logout":
                return await self._logout()
        if method not in Agent.METHODS:
            raise method_not_found(method)
        if not self._signed_in:
            raise auth_required("this agent was signed out; call authenticate, which reads the configuration again")
        return await self._configured().handle(method, params)

    def _initialize(self, params: Result) -> Result:
        result = initialize_result(params)
        self._capabilities = read_capabilities(params)
        return result

    async def _authenticate(self, params: Result) -> Result:
        """Close all sessions and read the configuration again, for new API keys."""
        if params.get("methodId") != AUTH_METHOD:
            raise invalid_params(f"methodId must be {AUTH_METHOD!r}, the only authentication method of this agent")
        await self._logout()
        self._signed_in = True
        self._configured()
        return {}

    async def _logout(self) -> Result:
        """Close all sessions, forget the API keys, and reject new sessions."""
        self._signed_in = False
        agent, self._agent = self._agent, None
        if agent is not None:
            await agent.close()
        return {}

    def _configured(self) -> Agent:
        if self._agent is None:
            try:
                settings = self._load()
            except ConfigError as error:
                raise internal_error(f"the configuration is invalid: {error}") from None
            for warning in settings.warnings:
                logger.warning("configuration is incomplete error=%r", warning)
            client = EditorClient(self._connection, self._transport, self._capabilities)
            self._agent = Agent(settings, client, self._capabilities)
        return self._agent


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
        """Return the next message from stdin as parsed JSON, or None at the end of stdin."""
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
        """Write a whole message to stdout as one line of JSON.

        Raises:
            ConnectionError: the editor has closed its end of this process's stdout.
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
        reason = f"a message is longer than {MAX_LINE_BYTES} bytes; send less content, for example fewer images"
        await self.send({"jsonrpc": "2.0", "id": None, "error": invalid_request(reason).body()})

    def _read(self) -> None:
        # Runs in a thread. Unlike reads of sys.stdin, os.read holds no lock that the interpreter needs at exit.
        with contextlib.suppress(RuntimeError):  # raised if the event loop is closed
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
            raise ConnectionError(f"the editor reads no more messages from stdout: {error.strerror}") from None
