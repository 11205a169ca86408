"""Divides free memory among a model's weights, KV cache and recurrent states.

The functions have no side effects.
"""

from collections.abc import Sequence

from helexa.core.display import memory_text
from helexa.core.errors import DoesNotFitError
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest

# Minimum number of positions in the KV cache, unless the context is shorter. With less memory, loading fails.
LEAST_CONTEXT = 2048

# The KV cache may exceed `MemoryRequest.share` up to this share of the remaining memory, to hold one full context.
_CONTEXT_SHARE = 0.5
_SLOTS_SHARE = 0.5  # maximum share of the memory after weights and steps for recurrent states of running sequences


def divide(request: MemoryRequest, free: int) -> MemoryGrant:
    """Return the memory grant for `request` if `free` bytes of memory are free.

    The weights and the largest step come first, then the slots for recurrent states, the KV cache and the snapshots.

    Raises:
        DoesNotFitError: the weights, the largest step, the smallest KV cache and one recurrent state need more than
            `free` bytes.
    """
    min_pages = min(request.pages, request.pages_for(min(request.context, LEAST_CONTEXT)))
    fixed_bytes = request.weights + request.step
    # While the weights load, the caches do not exist yet. Both phases, loading and running, must fit.
    required = max(fixed_bytes + _cache(request, min_pages) + request.state, request.weights + request.loading)
    if required > free:
        raise _does_not_fit(request, required, free, _cache(request, min_pages) + request.state)
    remaining = free - fixed_bytes
    sequences = request.sequences
    if request.state:
        # The KV cache keeps at least its smallest size.
        slots = min(int(remaining * _SLOTS_SHARE), remaining - _cache(request, min_pages)) // request.state
        sequences = min(sequences, max(slots, 1))
    remaining -= sequences * request.state
    # One full context may take more than `share`, so that a request can use the whole context of the model.
    full_context_bytes = min(_cache(request, request.pages_for(request.context)), int(remaining * _CONTEXT_SHARE))
    pages = _pages(
        request, min_pages, max(int(remaining * request.share), full_context_bytes, _cache(request, min_pages))
    )
    remaining -= _cache(request, pages)
    snapshots = min(request.snapshots, remaining // request.state) if request.state else 0
    state_bytes = (sequences + snapshots) * request.state
    total = max(fixed_bytes + _cache(request, pages) + state_bytes, request.weights + request.loading)
    return MemoryGrant(total=total, pages=pages, sequences=sequences, snapshots=snapshots)


def least_grant(grants: Sequence[tuple[MemoryGrant, int]]) -> MemoryGrant:
    """Return a grant with the fewest pages, sequences and snapshots of all hosts.

    Args:
        grants: the grant of each host, and the bytes of one recurrent state in the layers of this host. The result has
            the `total` of the first host.
    """
    return MemoryGrant(
        total=grants[0][0].total,
        pages=min(grant.pages for grant, _ in grants),
        sequences=min(grant.sequences for grant, _ in grants),
        # A host without recurrent layers has no snapshots, and does not limit their number.
        snapshots=min((grant.snapshots for grant, state in grants if state), default=0),
    )


def divide_free_memory(request: MemoryRequest) -> MemoryGrant:
    """Return `divide(request, free)` for all free memory, up to `request.limit`."""
    return divide(request, min(request.free, request.limit or request.free))


def _cache(request: MemoryRequest, pages: int) -> int:
    """Return the bytes of `pages` KV pages, and of step memory that grows with pages."""
    longest = min(pages * request.page_size, request.context)
    return request.cache_bytes(pages) + pages * request.page_step + longest * request.position_step


def _pages(request: MemoryRequest, least: int, free: int) -> int:
    """Return how many KV pages fit into `free` bytes: from `least` to `request.pages`."""
    low, high = least, max(request.pages, least)
    # Bisection, because the memory of a step grows with the longest sequence and not only with the pages.
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _cache(request, middle) <= free else (low, middle - 1)
    return low


def _does_not_fit(request: MemoryRequest, required: int, free: int, cache: int) -> DoesNotFitError:
    loading = max(required - request.weights - request.step - cache, 0)
    sizes = {"weights": request.weights, "kv": cache, "activations": request.step, "loading": loading}
    numbers = {f"{name}_mb": _mb(size) for name, size in sizes.items() if size}
    breakdown = ", ".join(f"{name.removesuffix('_mb')} {memory_text(number)}" for name, number in numbers.items())
    suggestions = ["a smaller quant"]
    if required - cache <= free:
        suggestions += [f"a context_length below {min(request.context, LEAST_CONTEXT)}"]
        suggestions += ['kv_dtype = "int8"'] if request.kv_bits > 8 else []
    if request.weights + request.step > free >= request.weights:
        suggestions += ["fewer max_step_tokens", "fewer max_sequences"]
    suggestion = " or ".join([", ".join(suggestions[:-1]), suggestions[-1]] if len(suggestions) > 1 else suggestions)
    return DoesNotFitError(
        f"the model does not fit: it needs {memory_text(_mb(required))} ({breakdown}) of {request.device}, "
        f"{memory_text(free >> 20)} are free for the model; {suggestion} would help",
        required_mb=_mb(required),
        free_mb=free >> 20,
        **numbers,
        suggestion=suggestion,
    )


def _mb(size: int) -> int:
    return -(-size >> 20)
