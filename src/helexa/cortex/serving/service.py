"""Serves a parsed request: checks key, limits and budget, forwards the request to a node, and charges it."""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from helexa.core.errors import model_not_found
from helexa.core.fleet import Limit
from helexa.cortex.access.auth import authorise
from helexa.cortex.access.rate_limiter import RateLimitPermit
from helexa.cortex.fleet.capabilities import nodes_without_vision
from helexa.cortex.fleet.fleet_view import FleetView
from helexa.cortex.forwarding.proxy import NoResponse, Settle
from helexa.cortex.forwarding.sse_keep_alive import wait_for_load
from helexa.cortex.gateway import Gateway
from helexa.cortex.observability.request_record import RequestRecord
from helexa.cortex.replies.reply import Reply
from helexa.cortex.requests.prompt_check import advice, check_prompt, may_exceed
from helexa.cortex.requests.request import ClientRequest
from helexa.cortex.routing.affinity import affinity_key
from helexa.cortex.routing.router import Outcome, WarmRoute, breaker_error, may_retry, route
from helexa.cortex.serving.budget_reservation import reserve_budget
from helexa.cortex.serving.settlement import Settlement
from helexa.cortex.usage.media_tokens import has_media

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Waiter:
    """A request that waits for its model to load. Requests with a key have a higher priority than anonymous ones."""

    priority: int
    enqueued: float = field(default_factory=time.monotonic)


async def serve(
    gateway: Gateway, request: ClientRequest, response: Reply, record: RequestRecord, permit: RateLimitPermit
) -> None:
    """Check a request, forward it to a node, forward the response, and charge the request to its key.

    Args:
        gateway: the gateway.
        request: the parsed request.
        response: the response to the client.
        record: the request record.
        permit: tracks the request in the rate limits of its key. It was created before the body was read.

        Raises:
            ApiError: the request was rejected or failed. The caller must end the response with this error.
    """
    record.name, record.prompt_estimate = request.model, request.prompt_estimate
    model, fleet_view = gateway.catalogue.resolve(request.model), gateway.fleet.view()
    model_known = is_known(gateway, fleet_view, model)
    if model_known:
        record.model = model
    authorise(record.principal, model, request.model)
    if not model_known and any(node.healthy for node in fleet_view.nodes):
        raise model_not_found(request.model[:200])
    limit = _widest_limit(fleet_view, model)
    if limit is not None and may_exceed(request.body, limit.context):
        await gateway.body_workers.run_if(request.large, check_prompt, request.body, limit.context)
    hint = advice(request.headers)
    if hint is not None:
        response.headers.append((b"x-helexa-advice", hint))
    if not has_media(request.body):
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
    """Reserve the request's tokens, forward the request, and charge it. Its images were checked or fetched."""
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
                    permit.answered()
    finally:
        if record.usage is not None:
            permit.spent(record.usage.prompt + record.usage.completion)


def is_known(gateway: Gateway, view: FleetView, model: str) -> bool:
    """Return whether the catalogue or a node has a model with this id."""
    return gateway.catalogue.profile(model) is not None or view.knows(model)


async def _forward(
    gateway: Gateway, model: str, request: ClientRequest, response: Reply, record: RequestRecord, settle: Settle | None
) -> None:
    """Forward the request to a node. After a failure, retry on other nodes as long as `may_retry` allows it."""
    routing, key = gateway.config.routing, await _affinity_key(gateway, request, record)
    fleet_view = gateway.fleet.view()
    outcomes: list[Outcome] = []
    tried_nodes = nodes_without_vision(fleet_view, model) if request.images.count else set[str]()
    if request.previous is not None and (holder := fleet_view.holder(request.previous)) is not None:
        tried_nodes = {node.name for node in fleet_view.nodes} - {
            holder.name
        }  # no other node stores the previous response
    target = (
        route(fleet_view, model, key, routing, avoid=tried_nodes)
        or route(fleet_view, model, key, routing)
        or await _wait_for_model(gateway, model, request, response, record)
    )
    while True:
        tried_nodes.add(target.node)
        is_last = (
            len(fleet_view.nodes) == 1 or route(gateway.fleet.view(), model, key, routing, avoid=tried_nodes) is None
        )
        try:
            await gateway.proxy.ask(target, request, response, record, settle, last=is_last)
            return
        except NoResponse as error:
            log.warning("node=%s request failed: %s", target.node, error)
            outcomes.append(error.outcome)
            fallback = (
                route(gateway.fleet.view(), model, key, routing, avoid=tried_nodes) if may_retry(outcomes) else None
            )
            if fallback is None:
                raise error.error_response from error
            target = fallback


async def _affinity_key(gateway: Gateway, request: ClientRequest, record: RequestRecord) -> bytes | None:
    """Return the request's affinity key: a hash of its session or of the beginning of its prompt.

    The router sends requests with the same affinity key to the same node.

    The result is None if affinity is disabled or there are fewer than two nodes.
    """
    routing = gateway.config.routing
    if not routing.affinity or len(gateway.fleet.view().nodes) < 2:
        return None
    account = record.principal.account_id if record.principal else ""
    return await gateway.body_workers.run_if(
        request.large, affinity_key, request.body, request.headers, account, routing.affinity_min_bytes
    )


async def _wait_for_model(
    gateway: Gateway, model: str, request: ClientRequest, response: Reply, record: RequestRecord
) -> WarmRoute:
    """Load the model, wait until it is loaded, and return the node that serves it."""
    load_failure = breaker_error(gateway.fleet.view(), model)
    if load_failure is not None:
        raise load_failure
    started_at = asyncio.get_running_loop().time()
    try:
        load = gateway.lifecycle.serve(model, Waiter(1 if record.principal else 0))
        return await wait_for_load(load, lambda: gateway.lifecycle.progress(model), request.stream, response)
    finally:
        record.loading = asyncio.get_running_loop().time() - started_at


def _widest_limit(view: FleetView, model: str) -> Limit | None:
    """Return the model's token limits from the node that reports the largest context length, or None.

    A prompt that exceeds this context length cannot be served by any node.
    """
    limits = [node.models[model].limit for node in view.nodes if model in node.models]
    return max((limit for limit in limits if limit is not None), key=lambda limit: limit.context, default=None)
