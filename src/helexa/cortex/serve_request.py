"""Serves a parsed request: finds its model, checks, forwards and charges it."""

import asyncio
import logging

from helexa.core.errors import ApiError
from helexa.core.known_models import full_name
from helexa.core.logs import quoted
from helexa.core.node_reports import Limit
from helexa.cortex.access.auth import authorize
from helexa.cortex.access.rate_limiter import RateLimitPermit
from helexa.cortex.fleet.fleet_view import FleetView, find_local, nodes_without_vision, same_files
from helexa.cortex.forwarding.client_reply_and_error_events import Reply
from helexa.cortex.forwarding.headers import advice
from helexa.cortex.forwarding.proxy_and_cancellation import Settle
from helexa.cortex.forwarding.relay_and_keep_alive import wait_for_load
from helexa.cortex.forwarding.request import ClientRequest
from helexa.cortex.forwarding.retry import NoResponse, Outcome, may_retry
from helexa.cortex.forwarding.token_bounds import MAX_BYTES_PER_TOKEN, check_prompt
from helexa.cortex.gateway import Gateway
from helexa.cortex.lifecycle.load_queue import WaitingRequest
from helexa.cortex.request_record import RequestRecord
from helexa.cortex.reservation_and_settlement import Settlement, reserve_budget
from helexa.cortex.routing import WarmRoute, affinity_key, breaker_error, prefix_name, route, unknown_model

log = logging.getLogger(__name__)


async def serve(
    gateway: Gateway, request: ClientRequest, response: Reply, record: RequestRecord, permit: RateLimitPermit
) -> None:
    """Check a request, forward it to a node, and charge it to its key.

    Args:
        permit: tracks the request in the rate limits of its key. It was created before the body was read.

    Raises:
        ApiError: the request was rejected or failed. The caller must end the response with this error.
    """
    record.name, record.prompt_estimate = request.model, request.prompt_estimate
    fleet_view, model, model_known = await find_model(gateway, request.model)
    if model_known:
        record.model = model
    # Access is checked before the error for unknown models, so that clients cannot find out which models exist.
    authorize(record.principal, model, request.model)
    if not model_known and any(node.healthy for node in fleet_view.nodes):
        raise unknown_model(fleet_view, request.model)
    limit = _widest_limit(fleet_view, model)
    # A prompt that is too long for every node is rejected here, because a node would tokenize it before rejecting it.
    if limit is not None and len(request.body) > MAX_BYTES_PER_TOKEN * limit.context:
        await gateway.body_workers.run_if(request.large, check_prompt, request.body, limit.context)
    hint = advice(request.headers)
    if hint is not None:
        response.headers.append((b"x-helexa-advice", hint))
    if not request.has_media:
        await _serve_prepared(gateway, model, request, response, record, permit, limit)
        return
    async with gateway.prepared_images(model, request.body) as prepared:
        request = request.with_images(prepared.body, prepared.images)
        record.prompt_estimate = request.prompt_estimate
        await _serve_prepared(gateway, model, request, response, record, permit, limit)


async def _serve_prepared(
    gateway: Gateway,
    model: str,
    request: ClientRequest,
    response: Reply,
    record: RequestRecord,
    permit: RateLimitPermit,
    limit: Limit | None,
) -> None:
    """Reserve tokens for a request with prepared images, forward it, and charge it."""
    tokens = request.tokens(limit)
    permit.hold_tokens(tokens)
    response.headers += permit.headers
    try:
        if record.principal is None:
            await _forward(gateway, model, request, response, record, None)
        else:
            reservation, request = await reserve_budget(
                gateway, gateway.fleet.view(), record.principal, record.request_id, model, request, limit
            )
            async with Settlement(reservation, request, record, gateway.calls) as settlement:
                try:
                    await _forward(gateway, model, request, response, record, settlement.settle)
                finally:
                    # The request must not count as running during the settlement, which may wait for the node or the
                    # database.
                    permit.answered()
    finally:
        if record.usage is not None:
            permit.spent(record.usage.prompt + record.usage.completion)


def resolve(gateway: Gateway, view: FleetView, name: str) -> tuple[str, bool]:
    """Return the id of the model that a request names, and whether it is known.

    The id is the target of an alias, or `name` itself. Ollama lists a model without a tag as `name:latest`, and accepts
    both names. The gateway also accepts both names, for every model. A model on the disk of a node has more names, such
    as the id without organization. Short names of well-known models, such as `llama3.2:1b`, are accepted, too.
    """
    model = gateway.catalog.resolve(name)
    if gateway.catalog.profile(model) is not None or view.has_model(model):
        return model, True
    latest = f"{model}:latest"
    if view.has_model(latest):
        return latest, True
    untagged = gateway.catalog.resolve(name.removesuffix(":latest"))
    if gateway.catalog.profile(untagged) is not None or view.has_model(untagged):
        return untagged, True
    local = find_local(view, gateway.catalog, model)
    if local is None and (full := full_name(model)) != model:
        return resolve(gateway, view, full)
    return (model, False) if local is None else (local, True)


async def find_model(gateway: Gateway, name: str) -> tuple[FleetView, str, bool]:
    """Return the fleet view, the id of the model `name`, and whether it is known.

    If the model is not known, the nodes are polled now: one of them may have loaded the model since its last poll.
    """
    view = gateway.fleet.view()
    model, known = resolve(gateway, view, name)
    if not known:
        await gateway.poller.refresh()
        view = gateway.fleet.view()
        model, known = resolve(gateway, view, name)
    return view, model, known


async def find_loadable(gateway: Gateway, name: str) -> str:
    """Return the id of the model `name`, for a request to load it.

    The model may be known, or only be on the disk of a node. If the catalog or a node has the same files under another
    id, return that id. If no model is found, return `name` with aliases resolved.
    """
    view, model, known = await find_model(gateway, name)
    local = None if known else view.local.find(model)
    return model if local is None else same_files(view, gateway.catalog, local) or local


async def _forward(
    gateway: Gateway, model: str, request: ClientRequest, response: Reply, record: RequestRecord, settle: Settle | None
) -> None:
    """Forward the request to a node; after a failure, to other nodes (`may_retry`)."""
    routing, key = gateway.config.routing, await _affinity_key(gateway, request, record)
    record.affinity_key = key
    fleet_view, requester = gateway.fleet.view(), record.requester
    outcomes: list[Outcome] = []
    unsuitable_nodes = nodes_without_vision(fleet_view, model) if request.images.count else set[str]()
    if request.previous is not None and (holder := fleet_view.holder(request.previous)) is not None:
        # The request continues a stored response (`previous_response_id`), which only the node `holder` has.
        unsuitable_nodes = {node.name for node in fleet_view.nodes} - {holder.name}
    tried_nodes = set(unsuitable_nodes)
    target = (
        route(fleet_view, model, key, routing, avoid=tried_nodes, requester=requester)
        # If only unsuitable nodes are left, one of them gets the request, and its error tells the client the cause.
        or route(fleet_view, model, key, routing, requester=requester)
        or await wait_for_model(gateway, model, request.stream, response, record)
    )
    while True:
        tried_nodes.add(target.node)
        is_last = (
            len(fleet_view.nodes) == 1
            or route(gateway.fleet.view(), model, key, routing, avoid=tried_nodes, requester=requester) is None
        )
        try:
            await gateway.proxy.ask(target, request, response, record, settle, last=is_last)
            return
        except NoResponse as error:
            outcomes.append(error.outcome)
            if error.outcome in ("declined", "failed"):
                record.failed_nodes.append(target.node)
            fallback = None
            if may_retry(outcomes):
                fallback = route(gateway.fleet.view(), model, key, routing, avoid=tried_nodes, requester=requester)
            # If the node no longer has the model (`gone`), load the model again, but only once. A node that loses the
            # model after each load must not make the request wait forever.
            loads_again = fallback is None and error.outcome == "gone" and outcomes.count("gone") == 1
            if fallback is not None:
                next_step = f"retry on node {fallback.node}"
            else:
                next_step = "load the model again" if loads_again else "respond with the error"
            log.warning(
                "request failed on a node node=%s error=%s next=%s", target.node, quoted(error), quoted(next_step)
            )
            if loads_again:
                fallback = await _load_again(gateway, model, request, response, record, error)
                tried_nodes = set(unsuitable_nodes)
            if fallback is None:
                raise error.error_response from error
            target = fallback


async def _load_again(
    gateway: Gateway, model: str, request: ClientRequest, response: Reply, record: RequestRecord, loss: NoResponse
) -> WarmRoute:
    """Load a model that its node has lost, and return the node that serves it.

    If the model is not found, raise the error response of `loss`, the failed attempt.
    """
    try:
        return await wait_for_model(gateway, model, request.stream, response, record)
    except ApiError as error:
        raise loss.error_response if error.code == "model_not_found" else error from error


async def _affinity_key(gateway: Gateway, request: ClientRequest, record: RequestRecord) -> bytes | None:
    """Return the affinity key; None if affinity is disabled or there is only one node."""
    routing = gateway.config.routing
    if not routing.affinity or len(gateway.fleet.view().nodes) < 2:
        return None
    account = record.principal.account_id if record.principal else ""
    return await gateway.body_workers.run_if(
        request.large, affinity_key, request.body, request.headers, account, routing.affinity_min_bytes
    )


async def wait_for_model(
    gateway: Gateway, model: str, stream: bool, response: Reply, record: RequestRecord
) -> WarmRoute:
    """Load the model, and return the node that serves it.

    If `stream` is true, the client gets keep-alive comments during the load (see `wait_for_load`). If the model's
    circuit breaker is open, raise its error without a load. The waiting time is stored in `record.loading`.
    """
    load_failure = breaker_error(gateway.fleet.view(), model, record.requester.client)
    if load_failure is not None:
        raise load_failure
    started_at = asyncio.get_running_loop().time()
    try:
        prompt = prefix_name(record.affinity_key) if record.affinity_key is not None else ""
        waiting = WaitingRequest(1 if record.principal else 0, prompt=prompt)
        load = gateway.lifecycle.serve(model, waiting)
        return await wait_for_load(load, lambda: gateway.lifecycle.progress(model), stream, response)
    finally:
        record.loading = asyncio.get_running_loop().time() - started_at


def _widest_limit(view: FleetView, model: str) -> Limit | None:
    """Return the model's limits from the node with the largest context.

    Return None if no node reports limits of the model.
    """
    # No node can serve a prompt that exceeds the context length of `widest`.
    widest: Limit | None = None
    for node in view.nodes:
        info = node.models.get(model)
        if info is not None and info.limit is not None and (widest is None or info.limit.context > widest.context):
            widest = info.limit
    return widest
