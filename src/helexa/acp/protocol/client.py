"""Requests to the client, for hosts and permissions."""

import asyncio
import contextlib
from typing import Any, Protocol

from helexa.acp.host.host import HostError
from helexa.acp.protocol.initialize import Abilities
from helexa.acp.protocol.wire import Wire, sent_id


class Connection(Protocol):
    """What is used of the SDK's connection."""

    async def send_request(self, method: str, params: Any = None) -> Any:
        """Ask the client."""
        ...

    async def send_notification(self, method: str, params: Any = None) -> None:
        """Tell the client."""
        ...


class EditorClient:
    """The client: what hosts need of it (`helexa.acp.host.host.Client`), and the way of updates."""

    def __init__(self, connection: Connection, wire: Wire, abilities: Abilities) -> None:
        self._connection = connection
        self._wire = wire
        self.reads_files = abilities.reads_files
        self.writes_files = abilities.writes_files
        self.runs_commands = abilities.runs_commands

    async def update(self, session_id: str, update: dict[str, Any]) -> None:
        """Send a `session/update`; one that nobody is there to read is dropped."""
        with contextlib.suppress(ConnectionError):
            await self._connection.send_notification("session/update", {"sessionId": session_id, "update": update})

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Call a method of the client; when cancelled, the client is told to drop it.

        Raises:
            HostError: it refused, failed, answered nonsense or is gone.
        """
        try:
            answer = await self._connection.send_request(method, params)
        except asyncio.CancelledError:
            if (id := sent_id()) is not None:
                self._wire.withdraw(id)
            raise
        except ConnectionError:
            raise HostError("the client is gone") from None
        except Exception as error:  # the SDK's RequestError: its message is the client's
            raise HostError(f"the client refused {method}: {str(error)[:500]}") from error
        if answer is None:
            return {}
        if not isinstance(answer, dict):
            raise HostError(f"the client's answer to {method} is no object")
        return answer
