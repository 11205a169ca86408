"""Models of the fleet and disks: `/v1/models`, `/api/models...`, `/api/explain`.

Clients that send the header `anthropic-version` get Anthropic's format of `/v1/models`, others get OpenAI's.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from helexa.core.errors import ApiError, model_not_found
from helexa.core.sse import KEEP_ALIVE, frame
from helexa.cortex.access.auth import allows
from helexa.cortex.anthropic.message_and_errors import VERSION_HEADER, invalid_anthropic_body
from helexa.cortex.api.admin_requests import ModelLoadRequest, ModelPullRequest, ModelUnloadRequest, PullCancelRequest
from helexa.cortex.api.listings import Entry, model_list
from helexa.cortex.fleet.fleet_view import VISION, Node
from helexa.cortex.fleet.node_errors import NodeError
from helexa.cortex.forwarding.headers import UNBUFFERED
from helexa.cortex.gateway import Gateway
from helexa.cortex.lifecycle.explain import explain
from helexa.cortex.lifecycle.fleet_snapshot import FleetSnapshot
from helexa.cortex.lifecycle.load_queue import WaitingRequest
from helexa.cortex.lifecycle.memory import totals
from helexa.cortex.lifecycle.pulls import NodePull, Pulls
from helexa.cortex.routes.keys_and_nodes import node_not_found, read_wait_secs
from helexa.cortex.routing import unknown_model
from helexa.cortex.serve_request import find_loadable, resolve
from helexa.http.headers import Headers
from helexa.http.request_cycle_and_disconnects import ClientDisconnected, DisconnectGuard
from helexa.http.responses import JsonResponse

_REFRESH_TIMEOUT_SECS = 2.0
_KEEP_ALIVE_SECS = 1.0

_DEFAULT_LIMIT = 20  # number of models on a page in Anthropic's format, as in Anthropic's own API
_MAX_LIMIT = 1000
_UNKNOWN_TIME = "1970-01-01T00:00:00Z"  # Anthropic's value for models whose release time is unknown


async def list_models(request: Request) -> Response:
    """`GET /v1/models`: respond with the models and aliases that the key may use."""
    entries = entries_of(request)
    if VERSION_HEADER in request.headers:
        return JsonResponse(_anthropic_page(entries, request.query_params))
    return JsonResponse({"object": "list", "data": entries})


async def get_model(request: Request) -> Response:
    """`GET /v1/models/...`: respond with one model or alias that the key may use."""
    entry = entry_of(request, request.path_params["model"])
    return JsonResponse(_anthropic_model(entry) if VERSION_HEADER in request.headers else entry)


def entry_of(request: Request, name: str) -> Entry:
    """Return the entry of the model or alias that `name` means in a request.

    Raises:
        ApiError: 404 if the model does not exist or the key of the request may not use it. 503 instead, if a node has
            not reported its models yet.
    """
    gateway: Gateway = request.app.state.gateway
    view = gateway.fleet.view()
    entries = {entry["id"]: entry for entry in entries_of(request)}
    entry = entries.get(name) or entries.get(resolve(gateway, view, name)[0])
    if entry is None:
        raise unknown_model(view, name)
    return entry


def entries_of(request: Request) -> list[Entry]:
    """Return the entries of `/v1/models` that the key of the request may use."""
    gateway: Gateway = request.app.state.gateway
    catalog, principal = gateway.catalog, request.state.principal
    entries = model_list(gateway.fleet.view(), catalog, int(time.time()), gateway.lifecycle.progress)
    return [entry for entry in entries if allows(principal, catalog.resolve(entry["id"]))]


_ADMIN_PRIORITY = 2  # higher than the priorities of clients' requests


async def load_model(request: Request) -> Response:
    """`POST /api/models/load`: load a model, and respond when it is loaded.

    If this takes longer than `wait_secs` seconds (query parameter), the response is 503, and the load continues.
    """
    gateway: Gateway = request.app.state.gateway
    wait_secs = read_wait_secs(request)
    body = await ModelLoadRequest.read(request)
    if body.node is not None:
        _check_node(gateway, body.node)
    model = await find_loadable(gateway, body.model)
    target = await gateway.lifecycle.load(model, body.node, WaitingRequest(_ADMIN_PRIORITY), wait_secs)
    return JsonResponse({"model": model, "node": target.node, "status": "loaded"})


async def unload_model(request: Request) -> Response:
    """`POST /api/models/unload`: unload a model from one node, or all healthy nodes."""
    gateway: Gateway = request.app.state.gateway
    body = await ModelUnloadRequest.read(request)
    model = await find_loadable(gateway, body.model)
    names = [body.node] if body.node is not None else _holders(gateway, model)
    for name in names:
        _check_node(gateway, name)
        await gateway.lifecycle.unload(model, name)
    return JsonResponse({"model": model, "node": names[0], "nodes": names, "status": "unloaded"})


async def clear_prefix_cache(request: Request) -> Response:
    """`DELETE /api/models/.../prefix-cache`: clear the cache on healthy nodes."""
    gateway: Gateway = request.app.state.gateway
    model = await find_loadable(gateway, request.path_params["model"])
    only = request.query_params.get("node")
    if only is not None:
        _check_node(gateway, only)
    nodes = [
        node
        for node in gateway.fleet.view().nodes
        if node.kind == "neuron" and node.healthy and only in (None, node.name)
    ]
    deleted: dict[str, int] = {}
    for node in nodes:
        bearer = gateway.fleet.bearer(node.name)
        try:
            deleted[node.name] = await gateway.client.clear_prefix_cache(node.endpoint, model, bearer)
        except NodeError as error:
            if error.status != 404:
                message = f"node '{node.name}' did not clear the prefix cache: {error}; try again"
                raise ApiError(502, "node_error", message) from None
        gateway.lifecycle.cleared(model, node.name)
    if not deleted:
        raise model_not_found(model[:200], "no node has this model, or saved prompts of this model")
    cleared = {"model": model, "nodes": list(deleted), "status": "cleared", "deleted_bytes": sum(deleted.values())}
    return JsonResponse(cleared)


def _holders(gateway: Gateway, model: str) -> list[str]:
    """Return the names of the nodes that have a model; healthy nodes only, if any."""
    nodes = [node for node in gateway.fleet.view().nodes if node.kind == "neuron" and model in node.models]
    if not nodes:
        raise model_not_found(model[:200], "no node has loaded this model")
    return [node.name for node in nodes if node.healthy] or [node.name for node in nodes]


def _check_node(gateway: Gateway, name: str) -> None:
    """Check that a node loads and unloads models at the gateway's request.

    Raises:
        ApiError: the node is not configured (404), is a third-party backend (409) or is down (503).
    """
    node = next((node for node in gateway.fleet.view().nodes if node.name == name), None)
    if node is None:
        raise node_not_found(name)
    if node.kind != "neuron":
        message = f"node '{name}' is a third-party backend; load and unload its models with its own commands"
        raise ApiError(409, "third_party_backend", message, param="node")
    if not node.healthy:
        reason = f": {node.problem}" if node.problem else ""
        message = f"node '{name}' is down{reason}; start it, or choose another node"
        raise ApiError(503, "node_down", message, type="api_error", retry_after=5)


async def get_explanation(request: Request) -> Response:
    """`GET /api/explain`: tell where a request for `model` would be sent now, and why.

    The query parameter `node` restricts the decision to one node. The parameter `without` excludes a node. With
    `for_load=true`, the decision is the one for a load by an administrator, who may load any model on the disks of
    nodes.
    """
    name = request.query_params.get("model", "")
    if not name:
        raise ApiError(
            400, "missing_model_field", "the query parameter 'model' is missing; write ?model=ID", param="model"
        )
    gateway: Gateway = request.app.state.gateway
    model = await find_loadable(gateway, name[:200])
    await gateway.lifecycle.estimate(model)
    snapshot = gateway.lifecycle.snapshot()
    if request.query_params.get("for_load") == "true":
        snapshot = replace(snapshot, requested=snapshot.requested | {model})
    only, without = request.query_params.get("node"), request.query_params.get("without")
    if only is not None or without is not None:
        snapshot = snapshot.restricted(lambda node: only in (None, node) and node != without)
    return JsonResponse(explain(snapshot, model))


async def list_local_models(request: Request) -> Response:
    """`GET /api/models/local`: respond with the models on the nodes' disks.

    For a node that does not respond within 2 seconds, the response has its last report.
    """
    gateway: Gateway = request.app.state.gateway
    names = [node.name for node in gateway.fleet.view().nodes if node.kind == "neuron" and node.healthy]
    with suppress(TimeoutError):
        async with asyncio.timeout(_REFRESH_TIMEOUT_SECS):
            await asyncio.gather(*(_refresh(gateway, name) for name in names))
    snapshot = gateway.lifecycle.snapshot()
    nodes = [_node_entry(snapshot, node) for node in snapshot.view.nodes if node.kind == "neuron"]
    return JsonResponse({"serves_local": snapshot.view.serves_local, "nodes": nodes})


async def pull_model(request: Request) -> Response:
    """`POST /api/models/pull`: start a download on a node; respond with its progress."""
    gateway: Gateway = request.app.state.gateway
    body = await ModelPullRequest.read(request)
    if body.node is not None:
        _check_node(gateway, body.node)
    started = await gateway.pulls.start(body.model, body.node, gateway.catalog)
    return PullStream(gateway.pulls, started) if body.stream else JsonResponse(started.json_dict(), 202)


async def cancel_pull(request: Request) -> Response:
    """`POST /api/models/pull/cancel`: cancel a download; a later one can resume it."""
    gateway: Gateway = request.app.state.gateway
    body = await PullCancelRequest.read(request)
    _check_node(gateway, body.node)
    return JsonResponse((await gateway.pulls.cancel(body.model, body.node)).json_dict())


async def list_pulls(request: Request) -> Response:
    """`GET /api/models/pulls`: respond with running and ended downloads of all nodes."""
    gateway: Gateway = request.app.state.gateway
    return JsonResponse({"pulls": [pull.json_dict() for pull in await gateway.pulls.all()]})


async def _refresh(gateway: Gateway, name: str) -> None:
    with suppress(KeyError, NodeError):
        await gateway.poller.refresh_local(name)


def _node_entry(snapshot: FleetSnapshot, node: Node) -> dict[str, Any]:
    local = node.local
    return {
        "name": node.name,
        "healthy": node.healthy,
        "downloads": local is not None and local.downloads,
        "complete": local is None or local.complete,
        "problems": [] if local is None else local.problems,
        "free_mb": max(snapshot.free(node).values(), default=None),
        "total_mb": max(totals(node).values(), default=None),
        "models": [
            model.json_dict() | {"status": info.status if (info := node.models.get(model.id)) else "cold"}
            for model in (() if local is None else local.models)
        ],
    }


class PullStream(Response):
    """A stream of a download's `progress` events; the last event is `done` or `error`.

    If the client disconnects, the download continues. Subclasses have other formats.
    """

    stream_type = b"text/event-stream; charset=utf-8"  # value of the header `content-type`

    def __init__(self, pulls: Pulls, started: NodePull) -> None:
        self._pulls, self._started = pulls, started

    def encode(self, state: NodePull) -> bytes:
        """Return a new state of the download as bytes for the client."""
        return frame(orjson.dumps(state.json_dict()), _EVENTS.get(state.pull.status, "error"))

    def unchanged(self, state: NodePull) -> bytes:
        """Return the bytes that keep the connection alive while nothing changes."""
        return KEEP_ALIVE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the download ends or the client disconnects."""
        await send({"type": "http.response.start", "status": 200, "headers": self._stream_headers()})
        try:
            with scope["extensions"][DisconnectGuard.NAME]:
                await self._stream(send)
        except ClientDisconnected:
            return
        await send({"type": "http.response.body"})

    async def _stream(self, send: Send) -> None:
        states, last = aiter(self._pulls.follow(self._started)), self._started
        step = asyncio.ensure_future(anext(states, None))
        try:
            while True:
                if not (await asyncio.wait([step], timeout=_KEEP_ALIVE_SECS))[0]:
                    await send({"type": "http.response.body", "body": self.unchanged(last), "more_body": True})
                    continue
                state = step.result()
                if state is None:
                    return
                last = state
                await send({"type": "http.response.body", "body": self.encode(state), "more_body": True})
                step = asyncio.ensure_future(anext(states, None))
        finally:
            step.cancel()

    def _stream_headers(self) -> Headers:
        return [(b"content-type", self.stream_type), (b"cache-control", b"no-store"), UNBUFFERED]


_EVENTS = {"running": "progress", "done": "done"}


def _anthropic_model(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an entry of `GET /v1/models` to the format of Anthropic's clients."""
    return {
        "type": "model",
        "id": entry["id"],
        "display_name": entry["id"],
        "created_at": _UNKNOWN_TIME,
        "lifecycle": "active",
        "max_input_tokens": entry.get("max_model_len") or entry.get("max_input_tokens"),
        "max_tokens": entry.get("max_output_tokens") or entry.get("max_model_len"),
        "capabilities": _capabilities(entry),
    }


def _anthropic_page(entries: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of `entries` that `limit`, `after_id` and `before_id` select.

    Raises:
        ApiError: 400 `invalid_anthropic_body`: `limit` is out of range, `after_id` and `before_id` are both set, or no
            entry has the given id.
    """
    limit = _limit(query.get("limit"))
    ids = [entry["id"] for entry in entries]
    after_id, before_id = query.get("after_id"), query.get("before_id")
    if after_id and before_id:
        raise invalid_anthropic_body("before_id", "cannot be combined with 'after_id'; send one of them")
    start = _index_of(ids, after_id, "after_id") + 1 if after_id else 0
    end = _index_of(ids, before_id, "before_id") if before_id else len(ids)
    page = entries[start:end][-limit:] if before_id else entries[start:end][:limit]
    return {
        "data": [_anthropic_model(entry) for entry in page],
        "has_more": len(page) < end - start,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _capabilities(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a model's capabilities in Anthropic's format, or None if unknown."""
    names = entry.get("capabilities")
    if not names:
        return None
    no, yes = {"supported": False}, {"supported": True}
    reasons = {"supported": bool(entry.get("reasoning"))}
    return {
        "batch": no,
        "citations": no,
        "code_execution": no,
        "context_management": no,
        "effort": reasons | dict.fromkeys(("low", "medium", "high", "xhigh", "max"), reasons),
        "image_input": {"supported": VISION in names},
        "pdf_input": no,
        "server_tools": no | {"code_execution": no, "web_search": no},
        "structured_outputs": yes,
        "thinking": reasons | {"types": dict.fromkeys(("adaptive", "enabled", "between_tools", "disabled"), yes)},
    }


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= _MAX_LIMIT:
        raise invalid_anthropic_body("limit", f"must be an integer from 1 to {_MAX_LIMIT}")
    return limit


def _index_of(ids: Sequence[str], id: str, field: str) -> int:
    if id not in ids:
        raise invalid_anthropic_body(field, f"model '{id[:200]}' not found; GET /v1/models lists the models")
    return ids.index(id)
