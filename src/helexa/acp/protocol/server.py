"""Serves the connection of one editor: handshake, calling the handler of each request, and shutdown."""

import logging
from collections.abc import Callable
from typing import Any

from helexa.acp.config import ConfigError, Settings
from helexa.acp.protocol import initialize
from helexa.acp.protocol.agent import Agent
from helexa.acp.protocol.client import EditorClient
from helexa.acp.protocol.initialize import ClientCapabilities
from helexa.acp.protocol.rejection import RpcError, auth_required, internal_error, invalid_params, method_not_found
from helexa.acp.protocol.validating_transport import Message, Transport, ValidatingTransport

logger = logging.getLogger(__name__)

Result = dict[str, Any]


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
    """Handles all requests of the editor. Every error is sent to the editor as a JSON-RPC error response."""

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
            logger.error("%s", error.message)
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
                logger.info("notification rejected: method=%s error=%s", method[:100], error.message)
                return None
            raise RequestError(error.code, error.message, error.data) from None
        except Exception:
            logger.exception("request failed: method=%s", method[:100])
            error = internal_error("Internal error; see the log of helexa-acp")
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
            raise auth_required("call authenticate, which reads the configuration again")
        return await self._configured().handle(method, params)

    def _initialize(self, params: Result) -> Result:
        result = initialize.initialize_result(params)
        self._capabilities = initialize.read_capabilities(params)
        return result

    async def _authenticate(self, params: Result) -> Result:
        """Close all sessions and read the configuration again, because it contains the API keys."""
        if params.get("methodId") != initialize.AUTH_METHOD:
            raise invalid_params(f"methodId must be {initialize.AUTH_METHOD!r}")
        await self._logout()
        self._signed_in = True
        self._configured()
        return {}

    async def _logout(self) -> Result:
        """Close all sessions, forget the API keys, and reject sessions until the editor calls `authenticate`."""
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
                logger.warning("%s", warning)
            client = EditorClient(self._connection, self._transport, self._capabilities)
            self._agent = Agent(settings, client, self._capabilities)
        return self._agent
