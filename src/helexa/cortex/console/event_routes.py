"""`GET /api/events`: a stream of server-sent events about nodes, models and finished requests."""

import asyncio
from collections.abc import Callable, Iterator

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from helexa.core.errors import ApiError, shutting_down
from helexa.cortex.access.auth import allows
from helexa.cortex.access.principal import Principal
from helexa.cortex.console.console import Console
from helexa.cortex.console.event_hub import EventHub, event, json_event
from helexa.cortex.requests.headers import UNBUFFERED
from helexa.cortex.routes.access import visible_account
from helexa.http.connections.client_disconnect import ClientDisconnected, DisconnectGuard
from helexa.http.connections.request_cycle import STOPPING
from helexa.http.connections.request_head import Headers

TOPICS = ("nodes", "models", "activity")
INTERVAL_SECS = 0.25
KEEP_ALIVE_SECS = 15.0

_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    UNBUFFERED,
]


async def get_events(request: Request) -> Response:
    """Respond with a stream of events of the topics in the query parameter `topics`. It never ends by itself.

    The topic `nodes` needs an admin's key if the gateway requires keys.
    """
    console: Console = request.app.state.console
    topics = [name for name in request.query_params.get("topics", "models,activity").split(",") if name]
    if not topics or not set(topics) <= set(TOPICS):
        raise ApiError(400, "invalid_parameter", f"'topics' must be a list of {', '.join(TOPICS)}", param="topics")
    principal: Principal | None = request.state.principal
    if (
        "nodes" in topics
        and console.gateway.authenticator.require_auth
        and (principal is None or principal.role != "admin")
    ):
        raise ApiError(403, "admin_only", "the topic 'nodes' requires an admin's API key", param="topics")
    return _EventStream(console, frozenset(topics), principal, visible_account(request))


class _EventStream(Response):
    """The response of `GET /api/events`."""

    def __init__(
        self, console: Console, topics: frozenset[str], principal: Principal | None, account: str | None
    ) -> None:
        self._console, self._topics, self._principal, self._account = console, topics, principal, account

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client disconnects, its key is revoked, its session ends, or the gateway stops."""
        with self._console.events.watching():
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                with scope["extensions"][DisconnectGuard.NAME]:
                    await self._stream(scope["headers"], scope["extensions"][STOPPING], send)
            except ClientDisconnected:
                return
        await send({"type": "http.response.body"})

    async def _stream(self, headers: Headers, is_stopping: Callable[[], bool], send: Send) -> None:
        changes = _Changes(self._console.events, self._topics, self._principal, self._account)
        time = asyncio.get_running_loop().time
        sent_at = time()
        while (problem := shutting_down() if is_stopping() else self._problem(headers)) is None:
            data = b"".join(changes.next())
            if not data and time() - sent_at >= KEEP_ALIVE_SECS:
                data = b": keep-alive\n\n"
            if data:
                sent_at = time()
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await asyncio.sleep(INTERVAL_SECS)
        await send({"type": "http.response.body", "body": json_event("end", problem.envelope()), "more_body": True})

    def _problem(self, headers: Headers) -> ApiError | None:
        """Return why the stream must end, or None."""
        try:
            principal = self._console.gateway.authenticator.admit(headers)
        except ApiError as error:
            return error
        before = self._principal
        if before is None or (principal is not None and principal.role == before.role):
            return None
        return ApiError(401, "session_ended", "the session has ended; sign in again")


class _Changes:
    """What one client has not received yet."""

    def __init__(self, hub: EventHub, topics: frozenset[str], principal: Principal | None, account: str | None) -> None:
        self._hub, self._topics, self._principal, self._account = hub, topics, principal, account
        self._node_number = 0
        self._request_number = hub.last_request
        self._models = b""

    def next(self) -> Iterator[bytes]:
        """Yield the events since the last call. The first call yields the whole state."""
        if "nodes" in self._topics:
            nodes, names, self._node_number = self._hub.nodes_since(self._node_number)
            if names is not None:
                yield json_event("names", names)
            for body in nodes:
                yield event("node", body)
        if "models" in self._topics:
            visible = [entry for entry in self._hub.models() if self._may_use(entry["id"])]
            if (body := orjson.dumps(visible)) != self._models:
                self._models = body
                yield event("models", body)
        if "activity" in self._topics:
            number = self._hub.last_request
            requests, dropped = self._hub.requests_since(self._request_number, self._account)
            self._request_number = number
            if dropped:
                yield json_event("dropped", {"requests": dropped})
            for body in requests:
                yield event("request", body)

    def _may_use(self, name: str) -> bool:
        return allows(self._principal, self._hub.resolve(name))
