"""Asks the user for permission to run tool calls, and stores the user's "always allow" decisions."""

import asyncio
import logging
from typing import Any, get_args

from helexa.acp.events import CallStarted
from helexa.acp.host.host import Client, HostError
from helexa.acp.preferences import Preferences, Project
from helexa.acp.protocol.initialize import ClientCapabilities
from helexa.acp.protocol.projection import event_updates
from helexa.acp.tools.tool import PermissionRequest, Scope, Verdict

logger = logging.getLogger(__name__)
MAX_WAIT_S = 3600.0


class Permissions:
    """The permissions that the user has given in one session and its project.

    If the user chooses "always allow", the decision applies to a `Scope`, which is a set of tool calls. The decision
    is saved for the project if the scope is persistent. Otherwise the decision applies only to this session.
    """

    def __init__(self, session_id: str, cwd: str, client: Client, preferences: Preferences) -> None:
        self._session_id = session_id
        self._cwd = cwd
        self._client = client
        self._preferences = preferences
        self._persisted = _by_scope(preferences.read(cwd))
        self._session: set[tuple[str, str]] = set()

    def ruling(self, scope: Scope) -> bool | None:
        """Return the user's earlier decision about all calls in `scope`.

        True means always allowed, False means always rejected, and None means that there is no such decision.
        """
        key = (scope.tool, scope.subject)
        if key in self._session:
            return True
        allowed = self._persisted.get(key)
        return None if allowed and not scope.persistent else allowed

    async def request(self, request: PermissionRequest) -> Verdict:
        """Ask the user for permission to run a tool call, and return the user's decision.

        If the editor fails or does not respond within an hour, the call is rejected.
        """
        scope = request.scope
        params = {
            "sessionId": self._session_id,
            "toolCall": _tool_call(request),
            "options": [
                {"optionId": "allow_once", "name": "Allow", "kind": "allow_once"},
                {"optionId": "allow_always", "name": f"Always allow {scope.label}"[:200], "kind": "allow_always"},
                {"optionId": "reject_once", "name": "Reject", "kind": "reject_once"},
            ],
        }
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                response = await self._client.request("session/request_permission", params)
        except (HostError, TimeoutError) as error:
            logger.warning("permission request failed: tool=%s error=%s", request.name, error or "timed out")
            return "reject_once"
        verdict = _verdict(response)
        if verdict == "allow_always":
            self._session.add((scope.tool, scope.subject))
            if scope.persistent:
                await asyncio.to_thread(self._preferences.grant, self._cwd, scope.tool, scope.subject, allowed=True)
        return verdict


def _tool_call(request: PermissionRequest) -> dict[str, Any]:
    event = CallStarted(request.call_id, request.name, request.card, request.arguments)
    (update,) = event_updates(event, ClientCapabilities())
    return {name: value for name, value in update.items() if name != "sessionUpdate"}


def _verdict(response: dict[str, Any]) -> Verdict:
    outcome = response.get("outcome")
    match outcome:
        case {"outcome": "selected", "optionId": str(chosen)} if chosen in get_args(Verdict):
            return chosen  # pyright: ignore[reportReturnType] - checked by the guard
        case {"outcome": "cancelled"}:
            return "cancelled"
        case _:
            return "reject_once"


def _by_scope(project: Project) -> dict[tuple[str, str], bool]:
    return {(grant.tool, grant.subject): grant.allowed for grant in project.grants}
