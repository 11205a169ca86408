"""Requests to the client (the editor): files, terminals and permissions."""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from helexa.acp.conversation_and_events import CallStarted
from helexa.acp.host import Client, HostError
from helexa.acp.preferences import Grant, Preferences
from helexa.acp.protocol.capabilities import ClientCapabilities
from helexa.acp.protocol.json_rpc import ValidatingTransport, sent_id
from helexa.acp.protocol.prompts_updates_and_replay import event_updates
from helexa.acp.tools.permission_rules import Offer, PermissionRequest, Scope
from helexa.acp.tools.tool_and_effects import Verdict

if TYPE_CHECKING:
    from acp.connection import Connection


class EditorClient:
    """Sends requests and session updates to the client (the editor)."""

    def __init__(
        self, connection: "Connection", transport: ValidatingTransport, capabilities: ClientCapabilities
    ) -> None:
        self._connection = connection
        self._transport = transport
        # the method `request` and the features of the editor, for the tools of sessions
        self.for_sessions = Client(
            self.request, capabilities.reads_files, capabilities.writes_files, capabilities.runs_commands
        )

    async def update(self, session_id: str, update: dict[str, Any]) -> None:
        """Send a `session/update` notification to the editor, if it is connected."""
        with contextlib.suppress(ConnectionError):
            await self._connection.send_notification("session/update", {"sessionId": session_id, "update": update})

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON-RPC request to the editor and return the result.

        The result null becomes an empty dictionary. If the calling task is canceled, the editor receives a cancel
        request.

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
            raise HostError(f"the editor disconnected before it answered {method}; open the session again") from None
        except Exception as error:  # RequestError of the SDK, with the editor's error message
            raise HostError(
                f"the editor rejected {method}: {str(error)[:500]}; correct the arguments, or use another tool"
            ) from error
        if response is None:
            return {}
        if not isinstance(response, dict):
            raise HostError(f"the editor's response to {method} is not a JSON object; use another tool or ask the user")
        return response


logger = logging.getLogger(__name__)
MAX_WAIT_S = 3600.0


class Permissions:
    """Requests permissions from the user, and keeps decisions by session and project.

    If the user chooses "always allow", the decision applies to a `Scope`, which is a set of tool calls. The decision
    applies to this session, or it is saved for the project if the user chooses so.
    """

    def __init__(self, session_id: str, cwd: str, client: Client, preferences: Preferences) -> None:
        self._session_id = session_id
        self._cwd = cwd
        self._client = client
        self._preferences = preferences
        self._session: dict[tuple[str, str], Grant] = {}

    def ruling(self, scope: Scope) -> bool | None:
        """Return the user's decision about all calls in `scope`, or None if there is none."""
        decision = self._decisions().get((scope.tool, scope.subject))
        return None if decision is None else decision[0].allowed

    def remember(self, scope: Scope, allowed: bool) -> None:
        """Apply the user's decision to all calls in `scope`, until the session ends."""
        self._session[scope.tool, scope.subject] = Grant(scope.tool, scope.subject, allowed, scope.label)

    def decisions(self) -> list[tuple[Grant, bool]]:
        """Return the user's decisions, each with whether it is saved for the project."""
        return list(self._decisions().values())

    async def revoke(self, grant: Grant) -> None:
        """Delete the decision about the calls of `grant`, from the session and from disk."""
        self._session.pop((grant.tool, grant.subject), None)
        await asyncio.to_thread(self._preferences.revoke, self._cwd, grant)

    async def request(self, request: PermissionRequest) -> Verdict:
        """Ask the user for permission to run a tool call, and return the user's decision.

        If the editor fails or does not respond within an hour, the call is rejected.
        """
        offers = {f"allow_always_{number}": offer for number, offer in enumerate(request.offers, 1)}
        params = {
            "sessionId": self._session_id,
            "toolCall": _tool_call(request),
            "options": [
                {"optionId": "allow_once", "name": "Allow", "kind": "allow_once"},
                *({"optionId": id, "name": _name(offer), "kind": "allow_always"} for id, offer in offers.items()),
                {"optionId": "reject_once", "name": "Reject", "kind": "reject_once"},
            ],
        }
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                response = await self._client.request("session/request_permission", params)
        except (HostError, TimeoutError) as error:
            logger.warning(
                "permission request failed session=%s tool=%s error=%r; the tool call is rejected",
                self._session_id,
                request.name,
                str(error) or "timed out",
            )
            return "reject_once"
        match response.get("outcome"):
            case {"outcome": "selected", "optionId": "allow_once"}:
                return "allow_once"
            case {"outcome": "selected", "optionId": str(chosen)} if chosen in offers:
                await self._allow_always(offers[chosen])
                return "allow_always"
            case {"outcome": "cancelled"}:
                return "cancelled"
            case _:
                return "reject_once"

    def _decisions(self) -> dict[tuple[str, str], tuple[Grant, bool]]:
        """Return each decision and whether it is saved, by tool and subject."""
        # Saved decisions are read each time, because another session can revoke them.
        saved = {
            (grant.tool, grant.subject): grant
            for grant in self._preferences.read(self._cwd).grants
            # Earlier versions saved permissions without a label. Such a permission may allow too much, so ignore it.
            if grant.label or not grant.allowed
        }
        return {
            key: (grant, key in saved and saved[key].allowed == grant.allowed)
            for key, grant in (saved | self._session).items()
        }

    async def _allow_always(self, offer: Offer) -> None:
        self.remember(offer.scope, True)
        if offer.saved:
            grant = Grant(offer.scope.tool, offer.scope.subject, True, offer.scope.label)
            await asyncio.to_thread(self._preferences.grant, self._cwd, grant)


def _name(offer: Offer) -> str:
    return f"Always allow {offer.scope.label}, in this {'project' if offer.saved else 'session'}"


def _tool_call(request: PermissionRequest) -> dict[str, Any]:
    event = CallStarted(request.call_id, request.name, request.card, request.arguments)
    (update,) = event_updates(event, ClientCapabilities())
    return {name: value for name, value in update.items() if name != "sessionUpdate"}
