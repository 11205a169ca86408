"""`GET /api/events`: changes for clients that watch the gateway.

All watching clients share one `EventHub`. The hub computes the state of the nodes at most once per `REFRESH_SECS`, and
only if a client asks for it. Each client remembers the number of the last change that it has received. A slow client
therefore needs no queue: it receives the newest state of the nodes, and learns how many requests it has missed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from helexa.core.catalog import Catalog
from helexa.core.errors import ApiError, overloaded, shutting_down
from helexa.core.logs import LogLines
from helexa.core.sse import frame
from helexa.cortex.access.auth import allows
from helexa.cortex.access.keys import Principal
from helexa.cortex.api.listings import Dynamics, Entry, dynamics, model_list, node_entry
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_view import FleetView, Node
from helexa.cortex.fleet.poller import Poller
from helexa.cortex.forwarding.headers import UNBUFFERED
from helexa.cortex.gateway import Gateway
from helexa.cortex.ledger.activity_and_usage_totals import Activity
from helexa.cortex.lifecycle.lifecycle import Lifecycle
from helexa.cortex.routes.access_and_errors import visible_account
from helexa.http.headers import Headers
from helexa.http.request_cycle_and_disconnects import STOPPING, ClientDisconnected, DisconnectGuard

REFRESH_SECS = 0.2
MODELS_REFRESH_SECS = 1.0  # the list of models takes longer to compute, and changes less often than the nodes' load
MAX_REQUESTS = 1000
MAX_WATCHERS = 200
RETRY_SECS = 10

TOPICS = ("nodes", "models", "activity", "log")
INTERVAL_SECS = 0.25
KEEP_ALIVE_SECS = 15.0


class _Watched:
    """The last computed state of one node, and the number of its last change."""

    __slots__ = ("body", "number", "source")

    def __init__(self, source: tuple[Node, Dynamics], body: bytes, number: int) -> None:
        self.source, self.body, self.number = source, body, number


class EventHub:
    """Numbers the changes for `GET /api/events`, so that no client gets one twice."""

    def __init__(
        self,
        fleet: Fleet,
        lifecycle: Lifecycle,
        poller: Poller,
        catalog: Callable[[], Catalog],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._lifecycle, self._poller, self._catalog = fleet, lifecycle, poller, catalog
        self._clock = clock
        self._watchers = 0
        self._number = 0
        self._refreshed_at = -REFRESH_SECS
        self._nodes: dict[str, _Watched] = {}
        self._names: tuple[str, ...] = ()
        self._names_number = 0
        self._requests: deque[tuple[str | None, bytes]] = deque(maxlen=MAX_REQUESTS)
        self._requests_count = 0
        self._models: list[Entry] = []
        self._models_view: FleetView | None = None
        self._models_at = -MODELS_REFRESH_SECS

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count a client that reads the events in a `with` block.

        Raises:
            ApiError: 503 if `MAX_WATCHERS` clients read the events already.
        """
        if self._watchers >= MAX_WATCHERS:
            raise overloaded(
                f"{MAX_WATCHERS} clients already read the events of this gateway; close a page of the console",
                RETRY_SECS,
            )
        self._watchers += 1
        try:
            with self._poller.watched():
                yield
        finally:
            self._watchers -= 1
            # Without watchers, nothing reads the requests, so they need not stay in memory.
            if not self._watchers:
                self._requests.clear()

    def publish(self, activity: Activity) -> None:
        """Add a finished request, if any client reads the events."""
        if self._watchers:
            self._requests.append((activity.account_id, orjson.dumps(activity)))
            self._requests_count += 1

    @property
    def last_request(self) -> int:
        """Number of the newest published request; 0 before the first."""
        return self._requests_count

    def requests_since(self, number: int, account: str | None) -> tuple[list[bytes], int]:
        """Return the finished requests after number `number`, and how many were dropped.

        If `account` is not None, only the requests of this account are returned, but dropped requests of all accounts
        are counted.
        """
        new = self._requests_count - number
        kept = min(new, len(self._requests))
        # A deque has no slices, and copying all requests for each client is slow. The requests are read one by one.
        recent = [self._requests[-position] for position in range(kept, 0, -1)]
        return [body for owner, body in recent if account in (None, owner)], new - kept

    def nodes_since(self, number: int) -> tuple[list[bytes], list[str] | None, int]:
        """Return the nodes that have changed after the change `number`.

        Returns:
            The changed nodes as JSON, the names of all nodes in configured order if nodes were added or removed (else
            None), and the number of the last change.
        """
        self._refresh()
        changed = [self._nodes[name].body for name in self._names if self._nodes[name].number > number]
        return changed, list(self._names) if self._names_number > number else None, self._number

    def models(self) -> list[Entry]:
        """Return the entries of `/v1/models`, at most a second old."""
        now = self._clock()
        if now - self._models_at >= MODELS_REFRESH_SECS:
            self._models_at = now
            view = self._fleet.view()
            # The view does not contain the progress of loads. While a model loads, the list changes without a new view.
            if view is not self._models_view or any(entry["state"] == "loading" for entry in self._models):
                self._models_view = view
                entries = model_list(view, self._catalog(), 0, self._lifecycle.progress)
                self._models = [
                    {name: value for name, value in entry.items() if name != "created"} for entry in entries
                ]
        return self._models

    def resolve(self, name: str) -> str:
        """Return the id of the model that `name`, a model id or an alias, means."""
        return self._catalog().resolve(name)

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._refreshed_at < REFRESH_SECS:
            return
        self._refreshed_at = now
        view = self._fleet.view()
        by_node = dynamics(view, self._lifecycle.loads())
        names = tuple(node.name for node in view.nodes)
        if names != self._names:
            self._names, self._names_number = names, self._next()
            self._nodes = {name: watched for name, watched in self._nodes.items() if name in set(names)}
        for node in view.nodes:
            source, known = (node, by_node[node.name]), self._nodes.get(node.name)
            # `Node` is immutable, so the same object has not changed. Then the JSON, which takes long, is not built.
            if known is not None and known.source[0] is node and known.source[1] == source[1]:
                continue
            body = orjson.dumps(node_entry(*source))
            # A poll replaces the `Node` even if nothing that clients see has changed. Clients then get no event.
            if known is None or known.body != body:
                self._nodes[node.name] = _Watched(source, body, self._next())
            else:
                known.source = source

    def _next(self) -> int:
        self._number += 1
        return self._number


def _json_event(name: str, value: Any) -> bytes:
    """Return an event of `GET /api/events` whose data is `value` as JSON."""
    return frame(orjson.dumps(value), name)


_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    UNBUFFERED,
]


async def get_events(request: Request) -> Response:
    """Respond to `GET /api/events` with an endless stream of events.

    The query parameter `topics` selects the kinds of events. The topic `nodes` needs an admin's key if the gateway
    requires keys. The topic `log` always needs an admin's key.
    """
    gateway: Gateway = request.app.state.gateway
    hub: EventHub = request.app.state.console.events
    topics = [name for name in request.query_params.get("topics", "models,activity").split(",") if name]
    if not topics or not set(topics) <= set(TOPICS):
        raise ApiError(
            400, "invalid_parameter", f"'topics' must be a list of some of {', '.join(TOPICS)}", param="topics"
        )
    principal: Principal | None = request.state.principal
    is_admin = principal is not None and principal.role == "admin"
    for topic in ("nodes", "log"):
        is_open = topic == "nodes" and not gateway.authenticator.require_auth
        if topic in topics and not is_admin and not is_open:
            raise ApiError(
                403,
                "admin_only",
                f"the topic '{topic}' requires an admin's API key; sign in with an admin's key, or leave the topic out",
                param="topics",
            )
    return _EventStream(gateway, hub, frozenset(topics), principal, visible_account(request))


class _EventStream(Response):
    """The response of `GET /api/events`."""

    def __init__(
        self,
        gateway: Gateway,
        hub: EventHub,
        topics: frozenset[str],
        principal: Principal | None,
        account: str | None,
    ) -> None:
        self._gateway, self._hub = gateway, hub
        self._topics, self._principal, self._account = topics, principal, account

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client disconnects or loses access, or the gateway stops."""
        with self._hub.watching():
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            try:
                with scope["extensions"][DisconnectGuard.NAME]:
                    await self._stream(scope["headers"], scope["extensions"][STOPPING], send)
            except ClientDisconnected:
                return
        await send({"type": "http.response.body"})

    async def _stream(self, headers: Headers, is_stopping: Callable[[], bool], send: Send) -> None:
        changes = _Changes(self._hub, self._gateway.log_lines, self._topics, self._principal, self._account)
        time = asyncio.get_running_loop().time
        sent_at = time()
        while (problem := shutting_down() if is_stopping() else self._problem(headers)) is None:
            data = b"".join(changes.next())
            # Send a comment, which clients ignore. Proxies close a connection after about a minute without data.
            if not data and time() - sent_at >= KEEP_ALIVE_SECS:
                data = b": keep-alive\n\n"
            if data:
                sent_at = time()
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await asyncio.sleep(INTERVAL_SECS)
        await send({"type": "http.response.body", "body": _json_event("end", problem.envelope()), "more_body": True})

    def _problem(self, headers: Headers) -> ApiError | None:
        """Return why the stream must end; None if it may continue."""
        # This method runs before every batch of events, because the key may be revoked or expire during the stream.
        try:
            principal = self._gateway.authenticator.admit(headers)
        except ApiError as error:
            return error
        before = self._principal
        if before is None or (principal is not None and principal.role == before.role):
            return None
        return ApiError(401, "session_ended", "the session has ended; sign in again")


class _Changes:
    """Computes the events that one client has not received yet."""

    def __init__(
        self,
        hub: EventHub,
        log_lines: LogLines,
        topics: frozenset[str],
        principal: Principal | None,
        account: str | None,
    ) -> None:
        self._hub, self._topics, self._principal, self._account = hub, topics, principal, account
        self._log_lines, self._line_number = log_lines, log_lines.first
        self._node_number = 0
        self._request_number = hub.last_request
        self._models = b""

    def next(self) -> Iterator[bytes]:
        """Yield the events since the last call.

        The first call yields the whole state of nodes and models, and all stored lines of the log.
        """
        if "nodes" in self._topics:
            nodes, names, self._node_number = self._hub.nodes_since(self._node_number)
            if names is not None:
                yield _json_event("names", names)
            for body in nodes:
                yield frame(body, "node")
        if "models" in self._topics:
            visible = [entry for entry in self._hub.models() if self._may_use(entry["id"])]
            if (body := orjson.dumps(visible)) != self._models:
                self._models = body
                yield frame(body, "models")
        if "activity" in self._topics:
            # Only requests that end after this client connected are sent. Older requests are in the activity log.
            number = self._hub.last_request
            requests, dropped = self._hub.requests_since(self._request_number, self._account)
            self._request_number = number
            if dropped:
                yield _json_event("dropped", {"requests": dropped})
            for body in requests:
                yield frame(body, "request")
        if "log" in self._topics:
            if missed := max(0, self._log_lines.first - self._line_number):
                yield _json_event("dropped", {"lines": missed})
            lines = self._log_lines.since(self._line_number)
            self._line_number += missed + len(lines)
            for body in lines:
                yield frame(body, "log")

    def _may_use(self, name: str) -> bool:
        return allows(self._principal, self._hub.resolve(name))
