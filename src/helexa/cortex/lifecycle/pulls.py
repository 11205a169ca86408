"""Downloads of models that clients start on nodes through the gateway."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from helexa.core.catalog import Catalog
from helexa.core.errors import ApiError, service_unavailable
from helexa.core.known_models import full_name
from helexa.core.node_reports import Pull
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.fleet.fleet_view import Node
from helexa.cortex.fleet.node_client import NodeClient
from helexa.cortex.fleet.node_errors import NodeError
from helexa.cortex.fleet.poller import Poller

FOLLOW_SECS = 0.5  # interval between two requests for the progress of a download

_MAX_MISSES = 20  # failed requests in a row after which a download counts as lost
_RETRY_SECS = 5


@dataclass(frozen=True)
class NodePull:
    """A download (pull) on a node, and its last known state."""

    node: str
    pull: Pull

    def json_dict(self) -> dict[str, Any]:
        """Return the download as a JSON object, without unknown values."""
        return {"node": self.node, **self.pull.json_dict()}


class Pulls:
    """Starts, watches and cancels downloads (pulls), whose state is on the nodes."""

    def __init__(self, fleet: Fleet, client: NodeClient, poller: Poller) -> None:
        self._fleet = fleet
        self._client = client
        self._poller = poller

    async def start(self, model: str, node: str | None, catalog: Catalog) -> NodePull:
        """Start the download of a model, or join a running one, and return its state.

        Args:
            model: a source id such as `org/name` or `org/name:Q4_K_M`, a short name of a well-known model such as
                `llama3.2:1b`, or the id of a model in the catalog.
            node: name of the node, or None for the first node that downloads models on request.

        Raises:
            ApiError: the node is down, downloads no models on request, or rejects the download. Without `node`: no node
                downloads models on request.
            KeyError: the node is not configured.
        """
        chosen = self._first_node() if node is None else self._fleet.node(node)
        profile = catalog.profile(catalog.resolve(model))
        source = full_name(model) if profile is None else profile.full_source() or profile.id
        with _as_api_errors(chosen.name):
            pull = await self._client.start_pull(chosen.endpoint, source, self._fleet.bearer(chosen.name))
        return NodePull(chosen.name, pull)

    async def cancel(self, model: str, node: str) -> NodePull:
        """Cancel a download, and return its state.

        Args:
            model: the `model` in the download's state, or a short name; not the id of a model in the catalog.

        Raises:
            ApiError: 404 if the node does not download the model; 502 or 503 if the node does not respond.
            KeyError: the node is not configured.
        """
        chosen = self._fleet.node(node)
        source = full_name(model)  # the name under which the node runs the download
        with _as_api_errors(node):
            return NodePull(node, await self._client.cancel_pull(chosen.endpoint, source, self._fleet.bearer(node)))

    async def all(self) -> list[NodePull]:
        """Return the running and the last ended downloads of all nodes that respond."""
        nodes = [node for node in self._fleet.view().nodes if _may_pull(node)]
        lists = await asyncio.gather(*map(self._pulls_of, nodes))
        return [NodePull(node.name, pull) for node, pulls in zip(nodes, lists, strict=True) for pull in pulls]

    async def follow(self, started: NodePull) -> AsyncIterator[NodePull]:
        """Yield `started`, then each changed state of the download until it ends.

        If the node does not respond for a while, or no longer lists the download, the last state is `failed`.
        """
        last, misses = started, 0
        yield last
        while last.pull.status == "running":
            await asyncio.sleep(FOLLOW_SECS)
            try:
                node = self._fleet.node(last.node)
                pulls = await self._client.pulls(node.endpoint, self._fleet.bearer(node.name))
                pull = next((pull for pull in pulls if pull.model == started.pull.model), None)
                misses = 0
            except (KeyError, NodeError):
                misses += 1
                pull = last.pull
            if pull is None or misses >= _MAX_MISSES:
                pull = last.pull.model_copy(
                    update={"status": "failed", "error": "the node no longer lists this download; start it again"}
                )
            if pull.status == "done":
                with suppress(KeyError, NodeError):
                    await self._poller.refresh_local(last.node, forced=True)
            if pull != last.pull:
                last = NodePull(last.node, pull)
                yield last

    async def _pulls_of(self, node: Node) -> list[Pull]:
        try:
            return await self._client.pulls(node.endpoint, self._fleet.bearer(node.name))
        except NodeError:
            return []

    def _first_node(self) -> Node:
        nodes = [node for node in self._fleet.view().nodes if node.healthy and node.kind == "neuron"]
        if not nodes:
            raise service_unavailable("no node is up; `helexa status` shows why", _RETRY_SECS)
        node = next((node for node in nodes if _may_pull(node) and not node.cordoned), None)
        if node is None:
            raise ApiError(
                409,
                "downloads_disabled",
                "no node downloads models on request; set on_request in [downloads] of a neuron.toml",
            )
        return node


def _may_pull(node: Node) -> bool:
    return node.kind == "neuron" and node.healthy and node.local is not None and node.local.downloads


@contextmanager
def _as_api_errors(node: str) -> Iterator[None]:
    """Convert a `NodeError` of the `with` block to the gateway's error response."""
    try:
        yield
    except NodeError as error:
        message = f"node '{node}': {error}"
        match error.status:
            case 400:
                raise ApiError(400, "invalid_source", message, param="model") from None
            case 403:
                raise ApiError(409, "downloads_disabled", message, param="node") from None
            case 404:
                raise ApiError(404, "pull_not_found", message, param="model") from None
            case 503:
                raise service_unavailable(message, _RETRY_SECS) from None
            case _:
                raise ApiError(502, "node_error", message) from None
