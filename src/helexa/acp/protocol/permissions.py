"""Permission requests to the user, and storage of "always" answers."""

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
    """The permissions of one session.

    An "always" answer of the user covers a `Scope`: a set of tool calls. If the scope is persistent, the answer is
    saved for the project, else the answer holds only in this session. Saved scopes that this version does not use have
    no effect.
    """

    def __init__(self, session_id: str, cwd: str, client: Client, preferences: Preferences) -> None:
        self._session_id = session_id
        self._cwd = cwd
        self._client = client
        self._preferences = preferences
        self._persisted = _by_scope(preferences.read(cwd))
        self._session: set[tuple[str, str]] = set()

    def ruling(self, scope: Scope) -> bool | None:
        """Return True for an allowed scope, False for a rejected scope, None if the user gave no "always" answer."""
        key = (scope.tool, scope.subject)
        if key in self._session:
            return True
        allowed = self._persisted.get(key)
        return None if allowed and not scope.persistent else allowed

    async def request(self, request: PermissionRequest) -> Verdict:
        """Ask the user and return the verdict. A failing client, or an hour without a response, is a rejection."""
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
