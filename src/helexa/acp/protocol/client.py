"""Requests to the client (the editor): file access, terminals and permission requests."""

import asyncio
import contextlib
from typing import Any, Protocol

from helexa.acp.host.host import HostError
from helexa.acp.protocol.initialize import ClientCapabilities
from helexa.acp.protocol.validating_transport import ValidatingTransport, sent_id


class Connection(Protocol):
    """The methods of the ACP SDK's JSON-RPC connection that `EditorClient` uses."""

    async def send_request(self, method: str, params: Any = None) -> Any:
        """Send a JSON-RPC request to the editor, wait for the response and return its result."""
        ...

    async def send_notification(self, method: str, params: Any = None) -> None:
        """Send a JSON-RPC notification, to which the editor sends no response."""
        ...


class EditorClient:
    """Sends requests and session updates to the editor. Implements the protocol `helexa.acp.host.host.Client`."""

    def __init__(
        self, connection: Connection, transport: ValidatingTransport, capabilities: ClientCapabilities
    ) -> None:
        self._connection = connection
        self._transport = transport
        self.reads_files = capabilities.reads_files
        self.writes_files = capabilities.writes_files
        self.runs_commands = capabilities.runs_commands

    async def update(self, session_id: str, update: dict[str, Any]) -> None:
        """Send a `session/update` notification to the editor. If the editor has disconnected, do nothing."""
        with contextlib.suppress(ConnectionError):
            await self._connection.send_notification("session/update", {"sessionId": session_id, "update": update})

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON-RPC request to the editor and return the result.

        If the calling task is canceled, the editor receives a cancel request.

        Raises:
            HostError: the editor rejected the request, failed, sent an invalid response, or disconnected.
        """
        try:
            response = await self._connection.send_request(method, params)
        except asyncio.CancelledError:
            if (id := sent_id()) is not None:
                self._transport.cancel_request(id)
            raise
        except ConnectionError:
            raise HostError("the client has disconnected") from None
        except Exception as error:  # RequestError of the SDK with the client's message
            raise HostError(f"the client rejected {method}: {str(error)[:500]}") from error
        if response is None:
            return {}
        if not isinstance(response, dict):
            raise HostError(f"the client's response to {method} is not an object")
        return response
