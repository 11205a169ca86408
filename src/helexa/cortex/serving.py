"""Serves a parsed request: finds its model, checks, forwards and charges it.

A key with a budget reserves an upper bound of the tokens that a node can use for the request, in up to three steps:

1. The first bound is computed without a tokenizer, from the bytes of the body, the tokens of images, and the output
   limit.
2. If the budget is smaller, a node with the model counts the prompt's tokens, which gives a smaller bound.
3. If the budget is still smaller, and the request has no output limit, the gateway sets an output limit that the
   remaining budget allows.
"""

import asyncio
import logging
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from helexa.core.errors import ApiError
from helexa.core.fleet import Limit
from helexa.core.known_models import full_name
from helexa.cortex.access.auth import authorize
from helexa.cortex.access.keys import Principal
from helexa.cortex.access.rate_limiter import RateLimitPermit
from helexa.cortex.fleet.fleet_view import FleetView, find_local, nodes_without_vision, same_files
from helexa.cortex.forwarding.body_checks import MAX_BYTES_PER_TOKEN, check_prompt
from helexa.cortex.forwarding.client_reply import Reply
from helexa.cortex.forwarding.headers import advice
from helexa.cortex.forwarding.proxy import Settle
from helexa.cortex.forwarding.relay import wait_for_load
from helexa.cortex.forwarding.request import ClientRequest
from helexa.cortex.forwarding.retry import NoResponse, Outcome, may_retry
from helexa.cortex.forwarding.token_bounds import media_tokens
from helexa.cortex.forwarding.token_queries import NodeCalls
from helexa.cortex.gateway import Gateway
from helexa.cortex.ledger.reservation import Reservation
from helexa.cortex.lifecycle.load_queue import WaitingRequest
from helexa.cortex.observability.request_record import UPSTREAM_TIMEOUT, RequestRecord
from helexa.cortex.routing import WarmRoute, affinity_key, breaker_error, prefix_name, route, unknown_model
from helexa.cortex.upstream.meter import Usage

DEFAULT_OUTPUT = 8192
"""Output limit that the gateway sets for requests without an output limit, if their key has a cap.

Without this limit, a response could fill the context. The gateway would have to reserve so many tokens that it would
reject other requests of the key.
"""

THIRD_PARTY_OUTPUT = 4096
# Smallest output limit that the gateway sets. If the budget allows fewer output tokens, the request is rejected.
LEAST_OUTPUT = 256

_COUNT_MARGIN = 64  # the node's count lacks thinking markers, which a chat template may add
_LEAST_BYTES_PER_TOKEN = 3  # below most texts' value, so that prompt and default output fit the context


async def reserve_budget(
    gateway: Gateway,
    view: FleetView,
    principal: Principal,
    request_id: str,
    model: str,
    request: ClientRequest,
    limit: Limit | None,
) -> tuple[Reservation, ClientRequest]:
    """Reserve the tokens that `request` can use, from the budget of its key.

    If the key has no cap, an estimate is reserved, and no output limit is enforced.

    Returns:
        The reservation, and the request with the enforced output limit.

    Raises:
        ApiError: 429 if the remaining budget is too small. 503 if the ledger is not available.
    """
    ledger = gateway.ledger
    if principal.hard_cap is None:
        return await ledger.reserve(principal, request_id, model, request.tokens(limit)), replace(request, metered=True)
    spending, context = request.spending, None if limit is None else limit.context
    if request.has_media and not spending.fills(context):
        body = request.body
        # images cost tokens that the length of the text does not show
        media = await gateway.body_workers.run(media_tokens, body) if request.large else media_tokens(body)
        if media:
            spending = replace(spending, prompt=spending.prompt + media)
    output = default_output(view, model, request, context) if spending.output is None else spending.output
    tokens = spending.most_tokens(output, context)
    try:
        reservation = await ledger.reserve(principal, request_id, model, tokens)
        return reservation, replace(request, metered=True, enforced=output)
    except ApiError as error:
        if "tokens_left" not in error.extras:
            raise
        budget_error, tokens_left = error, int(error.extras["tokens_left"])
    if (
        spending.output is not None
        and replace(spending, prompt=1, continues=False).most_tokens(output, None) > tokens_left
    ):
        raise budget_error
    # The first reservation used an upper bound of the prompt. The node's exact count may fit into the budget.
    prompt_tokens = await gateway.calls.prompt_tokens(view, model, request)
    if prompt_tokens is not None:
        spending = replace(spending, prompt=min(prompt_tokens + _COUNT_MARGIN, spending.prompt), continues=False)
    reduced_tokens = spending.most_tokens(output, context)
    if reduced_tokens > tokens_left and spending.output is None and spending.limit_field is not None:
        prompt = spending.most_tokens(0, context)
        # The rest of the budget becomes the output limit, if the client has set none.
        output = min(output, max(tokens_left - prompt, 0) // spending.completions)
        reduced_tokens = spending.most_tokens(output, context)
        if output < LEAST_OUTPUT:
            raise budget_error
    if reduced_tokens == tokens:
        raise budget_error
    reservation = await ledger.reserve(principal, request_id, model, reduced_tokens)
    return reservation, replace(request, metered=True, enforced=output)


def default_output(view: FleetView, model: str, request: ClientRequest, context: int | None) -> int:
    """Return the output limit to enforce for a request that states no output limit."""
    # Third-party backends reject a request whose prompt and output limit together exceed the context. Helexa's own
    # nodes lower the limit themselves.
    if not any(model in node.models and node.kind != "neuron" for node in view.nodes):
        return DEFAULT_OUTPUT
    if context is None:
        return THIRD_PARTY_OUTPUT
    context_left = context - request.text_bytes // _LEAST_BYTES_PER_TOKEN - request.images.tokens
    return min(max(context_left, min(LEAST_OUTPUT, context)), THIRD_PARTY_OUTPUT)


log = logging.getLogger(__name__)


class Settlement:
    """Charges a request to its key, and releases its reservation on every code path.

    The charge depends on how the request ended:

    * For a complete response, the token counts in the response are charged. If a third-party backend reports none for
      prompt or answer, the gateway charges an estimate for this part.
    * If the response is incomplete, or the client disconnected, the gateway requests the token counts from the node and
      charges them. If the node reports none, the gateway charges an estimate and marks the ledger entry as estimated.
    * If the node timed out, the gateway requests the token counts from the node and charges them. If the node reports
      none, the request is free.
    * If the request was rejected or got no response from a node, it is free.

    A key with a cap is never charged more tokens than were reserved, even if a node reports more.
    """

    def __init__(
        self, reservation: Reservation, request: ClientRequest, record: RequestRecord, calls: NodeCalls
    ) -> None:
        self._reservation = reservation
        self._request = request
        self._record = record
        self._calls = calls

    async def settle(self) -> None:
        """Charge the response's token counts, or an estimate for a third-party backend.

        If a node of helexa sends no token counts, or the request is already charged, this method does nothing.
        """
        record = self._record
        if record.usage is None and record.meter is not None:
            usage = record.meter.usage()
            if usage is None and record.target is not None and record.target.kind != "neuron":
                usage, record.estimated = self._estimate(), True
            if usage is not None:
                record.usage = self._with_estimates(usage)
                await self._charge(record.usage)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.settle()
        record = self._record
        answered = record.meter is not None
        client_gone = isinstance(error, asyncio.CancelledError)
        timed_out = isinstance(error, ApiError) and error.code == UPSTREAM_TIMEOUT
        # A request without an answer is free. After a disconnect or timeout, the node may have generated tokens.
        if record.usage is None and record.target is not None and (answered or client_gone or timed_out):
            try:
                record.usage = await self._calls.usage(record.target, record.usage_id, answered=answered)
            finally:
                if record.usage is None and (answered or client_gone):
                    record.usage, record.estimated = self._estimate(), True
                if record.usage is not None:
                    await self._charge(record.usage)
        await self._reservation.release()

    def _with_estimates(self, usage: Usage) -> Usage:
        """Return `usage`, with estimates if a third-party backend reported counts of 0."""
        record = self._record
        if record.target is None or record.target.kind == "neuron":
            return usage
        lacks_completion = not usage.completion and self._request.spending.completions > 0
        if usage.prompt and not lacks_completion:
            return usage
        record.estimated, estimate = True, self._estimate()
        completion = max(estimate.completion, 1) if lacks_completion else usage.completion
        return replace(usage, prompt=usage.prompt or estimate.prompt, completion=completion)

    def _estimate(self) -> Usage:
        produced_tokens = self._record.meter.estimated_tokens() if self._record.meter else 0
        reserved = self._reservation.tokens
        prompt = min(self._request.prompt_estimate, reserved)
        return Usage(prompt, min(produced_tokens, reserved - prompt))

    async def _charge(self, usage: Usage) -> None:
        reserved = self._reservation.tokens
        # A key with a cap never pays more than was reserved.
        if self._request.enforced is not None and usage.prompt + usage.completion > reserved:
            log.warning(
                "more tokens reported than reserved, the reserved ones are charged: "
                "node=%s prompt=%d completion=%d reserved=%d",
                self._record.node,
                usage.prompt,
                usage.completion,
                reserved,
            )
            prompt = min(usage.prompt, reserved)
            usage = replace(usage, prompt=prompt, completion=reserved - prompt)
        await self._reservation.settle(
            usage.prompt,
            usage.completion,
            cached=usage.cached,
            node=self._record.node,
            estimated=self._record.estimated,
        )


async def serve(
    gateway: Gateway, request: ClientRequest, response: Reply, record: RequestRecord, permit: RateLimitPermit
) -> None:
    """Check a request, forward it and its response, and charge it to its key.

    Args:
        permit: tracks the request in the rate limits of its key. It was created before the body was read.

    Raises:
        ApiError: the request was rejected or failed. The caller must end the response with this error.
    """
    record.name, record.prompt_estimate = request.model, request.prompt_estimate
    fleet_view, model, model_known = await find_model(gateway, request.model)
    if model_known:
        record.model = model
    # Before the error for unknown models: a key must not find out which models exist.
    authorize(record.principal, model, request.model)
    if not model_known and any(node.healthy for node in fleet_view.nodes):
        raise unknown_model(fleet_view, request.model)
    limit = _widest_limit(fleet_view, model)
    # Rejected here, because the node would tokenize the whole prompt first.
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
                    # before the settlement, which may wait for the node or the database
                    permit.answered()
    finally:
        if record.usage is not None:
            permit.spent(record.usage.prompt + record.usage.completion)


def resolve(gateway: Gateway, view: FleetView, name: str) -> tuple[str, bool]:
    """Return the id of the model that `name` means, and whether the model is known.

    The id is the target of an alias, or `name` itself. Ollama lists a model without a tag as `name:latest`, and accepts
    both names. So does the gateway, for names with and without this tag. A model on the disk of a node has more names,
    such as the id without organization. Short names of well-known models, such as `llama3.2:1b`, mean these models.
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
    """Return the fleet's state, the id of the model `name`, and whether it is known.

    If the model is not known, the nodes are polled now: one of them may have loaded the model since its last poll.
    """
    view = gateway.fleet.view()
    model, known = resolve(gateway, view, name)
    if not known:
        # A node may have loaded the model since its last poll.
        await gateway.poller.refresh()
        view = gateway.fleet.view()
        model, known = resolve(gateway, view, name)
    return view, model, known


async def find_loadable(gateway: Gateway, name: str) -> str:
    """Return the id of the model `name`, which may also be a model on a node's disk."""
    view, model, known = await find_model(gateway, name)
    local = None if known else view.local.find(model)
    return model if local is None else same_files(view, gateway.catalog, local) or local


async def _forward(
    gateway: Gateway, model: str, request: ClientRequest, response: Reply, record: RequestRecord, settle: Settle | None
) -> None:
    """Forward the request to a node, and to others after failures (see `may_retry`)."""
    routing, key = gateway.config.routing, await _affinity_key(gateway, request, record)
    record.affinity_key = key
    fleet_view, requester = gateway.fleet.view(), record.requester
    outcomes: list[Outcome] = []
    unsuitable_nodes = nodes_without_vision(fleet_view, model) if request.images.count else set[str]()
    if request.previous is not None and (holder := fleet_view.holder(request.previous)) is not None:
        # no other node stores the previous response
        unsuitable_nodes = {node.name for node in fleet_view.nodes} - {holder.name}
    tried_nodes = set(unsuitable_nodes)
    target = (
        route(fleet_view, model, key, routing, avoid=tried_nodes, requester=requester)
        # an unsuitable node answers with a clear error
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
            retry_on = fallback.node if fallback else "-"
            log.warning("request failed: node=%s retry_on=%s: %s", target.node, retry_on, error)
            # Once only: a node that loses the model after each load must not make the request wait forever.
            if fallback is None and error.outcome == "gone" and outcomes.count("gone") == 1:
                fallback = await _load_again(gateway, model, request, response, record, error)
                tried_nodes = set(unsuitable_nodes)
            if fallback is None:
                raise error.error_response from error
            target = fallback


async def _load_again(
    gateway: Gateway, model: str, request: ClientRequest, response: Reply, record: RequestRecord, loss: NoResponse
) -> WarmRoute:
    """Load a model that its node has lost, and return the node that serves it."""
    try:
        return await wait_for_model(gateway, model, request.stream, response, record)
    except ApiError as error:
        raise loss.error_response if error.code == "model_not_found" else error from error


async def _affinity_key(gateway: Gateway, request: ClientRequest, record: RequestRecord) -> bytes | None:
    """Return the request's affinity key, or None if it is disabled or needless."""
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
    """Load the model, keeping a `stream` alive, and return the node that serves it."""
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
    """Return the model's limits from the node with the largest context, or None."""
    # A prompt that exceeds this context length cannot be served by any node.
    widest: Limit | None = None
    for node in view.nodes:
        info = node.models.get(model)
        if info is not None and info.limit is not None and (widest is None or info.limit.context > widest.context):
            widest = info.limit
    return widest
