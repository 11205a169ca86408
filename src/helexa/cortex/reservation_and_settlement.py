"""Reserve tokens of a key's budget for a request, and charge the used tokens.

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
from helexa.core.node_reports import Limit
from helexa.cortex.access.keys import Principal
from helexa.cortex.fleet.fleet_view import FleetView
from helexa.cortex.forwarding.request import ClientRequest
from helexa.cortex.forwarding.token_bounds import media_tokens
from helexa.cortex.forwarding.token_queries import NodeCalls
from helexa.cortex.gateway import Gateway
from helexa.cortex.ledger.leases_windows_and_over_budget import Reservation
from helexa.cortex.request_record import UPSTREAM_TIMEOUT, RequestRecord
from helexa.cortex.upstream.usage_meter import Usage

log = logging.getLogger(__name__)

DEFAULT_OUTPUT = 8192
"""Output limit that the gateway sets for requests without an output limit, if their key has a cap.

Without this limit, a response could fill the context. The gateway would have to reserve so many tokens that it would
reject other requests of the key.
"""

# Largest output limit that the gateway sets if a third-party backend has the model.
THIRD_PARTY_OUTPUT = 4096
# Smallest output limit that the gateway sets. If the budget allows fewer output tokens, the request is rejected.
LEAST_OUTPUT = 256

_COUNT_MARGIN = 64  # added to the node's count of prompt tokens, which lacks the thinking markers of chat templates
# Most texts have more bytes per token. With this low value, the prompt is overestimated, so that the prompt and the
# default output fit into the context together.
_LEAST_BYTES_PER_TOKEN = 3


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
        The reservation, which the caller passes to a `Settlement`, and the request with the enforced output limit.

    Raises:
        ApiError: 429 if the remaining budget is too small. 503 if the ledger is not available.
    """
    ledger = gateway.ledger
    if principal.hard_cap is None:
        return await ledger.reserve(principal, request_id, model, request.tokens(limit)), replace(request, metered=True)
    spending, context = request.spending, None if limit is None else limit.context
    if request.has_media and not spending.fills(context):
        body = request.body
        # `spending.prompt` is computed from the length of the body, which does not show the tokens of images.
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
        # Even with a prompt of one token, the client's output limit exceeds the budget.
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
    # The bound is not smaller than at the first attempt, so another reservation would fail, too.
    if reduced_tokens == tokens:
        raise budget_error
    reservation = await ledger.reserve(principal, request_id, model, reduced_tokens)
    return reservation, replace(request, metered=True, enforced=output)


def default_output(view: FleetView, model: str, request: ClientRequest, context: int | None) -> int:
    """Return the output limit to reserve for a request that states none."""
    # Third-party backends reject a request whose prompt and output limit together exceed the context. Helexa's own
    # nodes lower the limit themselves.
    if not any(model in node.models and node.kind != "neuron" for node in view.nodes):
        return DEFAULT_OUTPUT
    if context is None:
        return THIRD_PARTY_OUTPUT
    context_left = context - request.text_bytes // _LEAST_BYTES_PER_TOKEN - request.images.tokens
    return min(max(context_left, min(LEAST_OUTPUT, context)), THIRD_PARTY_OUTPUT)


class Settlement:
    """Async context manager that charges a request and releases its reservation.

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

        If no response has begun, a node of helexa sends no token counts, or the request is already charged, this method
        does nothing.
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
        # A request without an answer is free. After a disconnect or timeout, the node may have generated tokens, so
        # the gateway requests their number.
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
        """Return `usage`, with estimates for counts of 0 from a third-party backend."""
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
                "more tokens reported than reserved node=%s prompt_tokens=%d completion_tokens=%d reserved_tokens=%d; "
                "the reserved tokens are charged",
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
