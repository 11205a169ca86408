"""The time limit of a request that waits for its model to load (a cold load)."""

import asyncio
from collections.abc import Callable
from math import ceil

from helexa.core.errors import ApiError, service_unavailable
from helexa.cortex.lifecycle.pending_loads import PendingLoad
from helexa.cortex.routing.router import WarmRoute

_RETRY_UNKNOWN_SECS = 10
_MAX_RETRY_SECS = 3600


async def wait_until_loaded(pending: PendingLoad, limit_secs: float, eta: Callable[[], float | None]) -> WarmRoute:
    """Wait until the model is loaded, at most `limit_secs` seconds, and return the node that serves the model.

    If the load will probably take more than twice `limit_secs`, the function raises the error without waiting.

    Args:
        pending: the model's load, for which requests wait.
        limit_secs: longest time to wait in seconds.
        eta: function that returns the expected seconds until the model is loaded, or None if they are unknown.

    Raises:
        ApiError: 503 with Retry-After if the model is not loaded in time. If the load fails, the load's own error.
    """
    expected = eta()
    if not pending.outcome.done() and expected is not None and expected > 2 * max(limit_secs, 1.0):
        raise _timeout_error(pending, expected)
    try:
        async with asyncio.timeout(max(0.0, limit_secs)):
            return await asyncio.shield(pending.outcome)
    except TimeoutError:
        raise _timeout_error(pending, eta()) from None


def _timeout_error(pending: PendingLoad, eta: float | None) -> ApiError:
    retry_after = _RETRY_UNKNOWN_SECS if eta is None else min(max(1, ceil(eta)), _MAX_RETRY_SECS)
    state = "is still loading" if pending.job is not None else "still waits for memory"
    return service_unavailable(f"model '{pending.model}' {state}", retry_after)
