"""What has changed in the fleet and in the activity log, for clients that watch it.

All watching clients share one `EventHub`. The hub computes the state of the nodes at most once per `REFRESH_SECS`, and
only if a client asks for it. Each client remembers the number of the last change that it has received. A slow client
therefore needs no queue: it receives the newest state of the nodes, and learns how many requests it has missed.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from helexa.core.catalogue import Catalogue
from helexa.core.errors import overloaded
from helexa.cortex.api.model_list import Entry, model_list
from helexa.cortex.api.node_list import Dynamics, dynamics, node_entry
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_view import FleetView, Node
from helexa.cortex.fleet.poller import Poller
from helexa.cortex.ledger.activity import Activity
from helexa.cortex.lifecycle.lifecycle import Lifecycle

REFRESH_SECS = 0.2
MODELS_REFRESH_SECS = 1.0
MAX_REQUESTS = 1000
MAX_WATCHERS = 200
RETRY_SECS = 10


class _Watched:
    """The last computed state of one node, and the number of its last change."""

    __slots__ = ("body", "number", "source")

    def __init__(self, source: tuple[Node, Dynamics], body: bytes, number: int) -> None:
        self.source, self.body, self.number = source, body, number


class EventHub:
    """Numbers the changes of nodes and the finished requests, so that each client can ask for what is new to it."""

    def __init__(
        self,
        fleet: Fleet,
        lifecycle: Lifecycle,
        poller: Poller,
        catalogue: Callable[[], Catalogue],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._lifecycle, self._poller, self._catalogue = fleet, lifecycle, poller, catalogue
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
        """Return a context manager during which a client watches: nodes are polled often, and requests are kept.

        Raises:
            ApiError: 503 if `MAX_WATCHERS` clients already watch.
        """
        if self._watchers >= MAX_WATCHERS:
            raise overloaded("too many clients watch this gateway", RETRY_SECS)
        self._watchers += 1
        try:
            with self._poller.watched():
                yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._requests.clear()

    def publish(self, activity: Activity) -> None:
        """Add a finished request, if any client watches."""
        if self._watchers:
            self._requests.append((activity.account_id, orjson.dumps(activity)))
            self._requests_count += 1

    @property
    def last_request(self) -> int:
        """Number of the last finished request."""
        return self._requests_count

    def requests_since(self, number: int, account: str | None) -> tuple[list[bytes], int]:
        """Return the requests after the request `number` as JSON, oldest first, and how many others were dropped.

        If `account` is not None, only the requests of this account are returned.
        """
        new = self._requests_count - number
        kept = min(new, len(self._requests))
        recent = [self._requests[-position] for position in range(kept, 0, -1)]
        return [body for owner, body in recent if account in (None, owner)], new - kept

    def nodes_since(self, number: int) -> tuple[list[bytes], list[str] | None, int]:
        """Return what has changed after the change `number`.

        Returns:
            The changed nodes as JSON, the names of all nodes in configured order if nodes were added or removed (else
            None), and the number of the last change.
        """
        self._refresh()
        changed = [self._nodes[name].body for name in self._names if self._nodes[name].number > number]
        return changed, list(self._names) if self._names_number > number else None, self._number

    def models(self) -> list[Entry]:
        """Return the entries of `/v1/models`, without the time of the response. They are at most a second old."""
        now = self._clock()
        if now - self._models_at >= MODELS_REFRESH_SECS:
            self._models_at = now
            view = self._fleet.view()
            if view is not self._models_view or any(entry["state"] == "loading" for entry in self._models):
                self._models_view = view
                entries = model_list(view, self._catalogue(), 0, self._lifecycle.progress)
                self._models = [
                    {name: value for name, value in entry.items() if name != "created"} for entry in entries
                ]
        return self._models

    def resolve(self, name: str) -> str:
        """Return the model id of a model id or alias."""
        return self._catalogue().resolve(name)

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
            if known is not None and known.source[0] is node and known.source[1] == source[1]:
                continue
            body = orjson.dumps(node_entry(*source))
            if known is None or known.body != body:
                self._nodes[node.name] = _Watched(source, body, self._next())
            else:
                known.source = source

    def _next(self) -> int:
        self._number += 1
        return self._number


def event(name: str, body: bytes) -> bytes:
    """Return a server-sent event. `body` is JSON without line breaks."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), body)


def json_event(name: str, value: Any) -> bytes:
    """Return a server-sent event whose data is `value` as JSON."""
    return event(name, orjson.dumps(value))
