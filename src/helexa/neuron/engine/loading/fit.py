"""Fits a model into free memory and sizes its KV cache: arithmetic without side effects."""

from helexa.core.errors import DoesNotFitError
from helexa.neuron.engine.ipc.messages import MemoryGrant, MemoryRequest

LEAST_CONTEXT = 2048
"""Minimum positions of the KV cache, if the context is not shorter; with less memory, the load fails."""

_CONTEXT_SHARE = 0.5  # of the remaining memory, for one full context; `MemoryRequest.share` applies beyond one context
_SLOTS_SHARE = 0.5  # of the memory after weights and steps, for the recurrent state of running sequences


def divide(needs: MemoryRequest, room: int) -> MemoryGrant:
    """Divide `room` bytes: weights and the largest step first, then state slots, the KV cache and snapshots.

    Raises:
        DoesNotFitError: the weights, the largest step and the smallest cache exceed `room`.
    """
    min_pages = min(needs.pages, needs.pages_for(min(needs.context, LEAST_CONTEXT)))
    fixed_bytes = needs.weights + needs.step
    required = max(fixed_bytes + _cache(needs, min_pages) + needs.state, needs.weights + needs.loading)
    if required > room:
        raise _refusal(needs, required, room, _cache(needs, min_pages) + needs.state)
    remaining = room - fixed_bytes
    sequences = needs.sequences
    if needs.state:
        slots = min(int(remaining * _SLOTS_SHARE), remaining - _cache(needs, min_pages)) // needs.state
        sequences = min(sequences, max(slots, 1))
    remaining -= sequences * needs.state
    full_context_bytes = min(_cache(needs, needs.pages_for(needs.context)), int(remaining * _CONTEXT_SHARE))
    pages = _pages(needs, min_pages, max(int(remaining * needs.share), full_context_bytes, _cache(needs, min_pages)))
    remaining -= _cache(needs, pages)
    snapshots = min(needs.snapshots, remaining // needs.state) if needs.state else 0
    state_bytes = (sequences + snapshots) * needs.state
    total = max(fixed_bytes + _cache(needs, pages) + state_bytes, needs.weights + needs.loading)
    return MemoryGrant(total=total, pages=pages, sequences=sequences, snapshots=snapshots)


def alone(needs: MemoryRequest) -> MemoryGrant:
    """Return the grant for an engine that shares the device's memory with no other engine."""
    return divide(needs, min(needs.free, needs.limit or needs.free))


def _cache(needs: MemoryRequest, pages: int) -> int:
    """Return the bytes of `pages` KV pages, plus the memory that a step takes for the positions in them."""
    longest = min(pages * needs.page_size, needs.context)
    return pages * (needs.page + needs.page_step) + longest * needs.position_step


def _pages(needs: MemoryRequest, least: int, room: int) -> int:
    """Return the largest number of pages, from `least` to `needs.pages`, whose `_cache` bytes fit into `room`.

    The result is `least` even if `least` pages exceed `room`.
    """
    low, high = least, max(needs.pages, least)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _cache(needs, middle) <= room else (low, middle - 1)
    return low


def _refusal(needs: MemoryRequest, required: int, room: int, cache: int) -> DoesNotFitError:
    loading = max(required - needs.weights - needs.step - cache, 0)
    parts = {"weights": needs.weights, "kv": cache, "activations": needs.step, "loading": loading}
    numbers = {f"{name}_mb": _mb(size) for name, size in parts.items() if size}
    breakdown = ", ".join(f"{name.removesuffix('_mb')} {number}" for name, number in numbers.items())
    suggestions = ["a smaller quant"]
    if required - cache <= room:
        suggestions += [f"a context_length below {min(needs.context, LEAST_CONTEXT)}", 'kv_dtype = "int8"']
    if needs.weights + needs.step > room >= needs.weights:
        suggestions += ["fewer max_step_tokens", "fewer max_sequences"]
    suggestion = " or ".join([", ".join(suggestions[:-1]), suggestions[-1]] if len(suggestions) > 1 else suggestions)
    return DoesNotFitError(
        f"the model does not fit: it needs {_mb(required)} MiB ({breakdown}) of {needs.device}, "
        f"{room >> 20} MiB are free for it; {suggestion} would help",
        required_mb=_mb(required),
        free_mb=room >> 20,
        **numbers,
        suggestion=suggestion,
    )


def _mb(size: int) -> int:
    return -(-size >> 20)
