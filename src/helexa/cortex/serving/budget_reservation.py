"""Reserves tokens of a key's budget before a request is forwarded.

The reserved number is an upper bound of the tokens that a node can use for the request. It is determined in up to three
steps:

1. The first upper bound is computed without a tokenizer, from the bytes of the body, the tokens of images, and the
   output limit.
2. If the budget is smaller than the first bound, a node with the model counts the prompt's tokens. This gives a smaller
   second bound.
3. If the budget is smaller than the second bound too, and the request has no output limit, the gateway sets an output
   limit that the remaining budget allows.
"""

from msgspec.structs import replace

from helexa.core.errors import ApiError
from helexa.core.fleet import Limit
from helexa.cortex.access.principal import Principal
from helexa.cortex.fleet.fleet_view import FleetView
from helexa.cortex.gateway import Gateway
from helexa.cortex.ledger.reservation import Reservation
from helexa.cortex.requests.request import ClientRequest
from helexa.cortex.usage.media_tokens import media_tokens

DEFAULT_OUTPUT = 8192
"""Output limit that the gateway sets for requests without an output limit, if their key has a cap.

Without this limit, a response could fill the context. The gateway would have to reserve so many tokens that it would
reject other requests of the key.
"""
THIRD_PARTY_OUTPUT = 4096
LEAST_OUTPUT = 256
"""Smallest output limit that the gateway sets. If the budget allows fewer output tokens, the request is rejected."""

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
    if not spending.fills(context):
        media = await gateway.body_workers.run_if(request.large, media_tokens, request.body)
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
    prompt_tokens = await gateway.counter.count(view, model, request)
    if prompt_tokens is not None:
        spending = replace(spending, prompt=min(prompt_tokens + _COUNT_MARGIN, spending.prompt), continues=False)
    reduced_tokens = spending.most_tokens(output, context)
    if reduced_tokens > tokens_left and spending.output is None and spending.limit_field is not None:
        prompt = spending.most_tokens(0, context)
        output = min(output, max(tokens_left - prompt, 0) // spending.completions)
        reduced_tokens = spending.most_tokens(output, context)
        if output < LEAST_OUTPUT:
            raise budget_error
    if reduced_tokens == tokens:
        raise budget_error
    reservation = await ledger.reserve(principal, request_id, model, reduced_tokens)
    return reservation, replace(request, metered=True, enforced=output)


def default_output(view: FleetView, model: str, request: ClientRequest, context: int | None) -> int:
    """Return the output limit to enforce for a request that states no output limit.

    Third-party backends reject a request if its prompt and its output limit together exceed the context length. For
    such a backend, the estimated prompt tokens are subtracted from the context. Helexa's own nodes lower the limit
    themselves.
    """
    if not any(model in node.models and node.kind != "neuron" for node in view.nodes):
        return DEFAULT_OUTPUT
    if context is None:
        return THIRD_PARTY_OUTPUT
    context_left = context - request.text_bytes // _LEAST_BYTES_PER_TOKEN - request.images.tokens
    return min(max(context_left, min(LEAST_OUTPUT, context)), THIRD_PARTY_OUTPUT)
