"""Several answers to one or more prompts, as one stream of events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from helexa.core.errors import ApiError, internal_error
from helexa.neuron.events import Failed, Finished, InferenceEvent, OfChoice, PromptCounted, Started

logger = logging.getLogger(__name__)

Run = AsyncGenerator[InferenceEvent, None]

_HELD = 4  # events of each run that may wait for a slow reader
_MOST_INSIDE = 16  # runs of one request at a time


async def all_choices(runs: Sequence[Callable[[], Run]], per_prompt: int) -> AsyncGenerator[InferenceEvent, None]:
    """Run all at once, or as many as there is room for, and say whose each event is; closing the iterator cancels them.

    The others begin when the first has read the prompt, which they then find in the KV cache. One that fails fails all.
    The last event counts the tokens of all, and each prompt once.

    Args:
        runs: what begins each of them, again if it is turned away while another one runs.
        per_prompt: number of runs that answer the same prompt, one after the other in `runs`.

    Raises:
        ApiError: before the first event only: the first run was refused. Later refusals are a `Failed` event.
    """
    events: asyncio.Queue[tuple[int, InferenceEvent]] = asyncio.Queue(_HELD * len(runs))
    tasks: list[asyncio.Task[None]] = []
    ends: dict[int, Finished] = {}
    inside = _Inside()
    first = runs[0]()
    try:
        yield await anext(first)
        inside.count += 1
        tasks.append(asyncio.create_task(_pump(0, first, events, inside)))
        while len(ends) < len(runs):
            index, event = await events.get()
            if isinstance(event, Failed):
                yield event
                return
            if isinstance(event, Finished):
                ends[index] = event
            if not isinstance(event, Started | PromptCounted | OfChoice):
                yield OfChoice(index, event)
            if len(tasks) == 1:
                later = [_begin(place, run, events, inside) for place, run in enumerate(runs) if place]
                tasks += map(asyncio.create_task, later)
        yield _total([ends[index] for index in range(len(runs))], per_prompt)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await first.aclose()


class _Inside:
    """The runs that have begun and not ended: `count`, and `left`, which is set when the next one ends."""

    def __init__(self) -> None:
        self.count = 0
        self.left = asyncio.Event()

    def leave(self) -> None:
        """One has ended."""
        self.count -= 1
        self.left.set()
        self.left = asyncio.Event()


Events = asyncio.Queue[tuple[int, InferenceEvent]]


async def _begin(index: int, begin: Callable[[], Run], events: Events, inside: _Inside) -> None:
    """Run one, as soon as there is room for it beside the others."""
    while True:
        while inside.count >= _MOST_INSIDE:
            await inside.left.wait()
        inside.count += 1
        async with aclosing(begin()) as run:
            left = inside.left
            try:
                event = await anext(run)
            except Exception as error:
                inside.count -= 1
                others = inside.count or left.is_set()  # they had the room, or had it until just now
                if not (others and isinstance(error, ApiError) and error.retry_after is not None):
                    await events.put((index, _failed(error)))
                    return
            else:
                await events.put((index, event))
                await _pump(index, run, events, inside)
                return
        await left.wait()


async def _pump(index: int, run: Run, events: Events, inside: _Inside) -> None:
    """Pass on what comes of one that is inside, until it ends."""
    try:
        async for event in run:
            await events.put((index, event))
    except Exception as error:
        await events.put((index, _failed(error)))
    finally:
        inside.leave()


def _failed(error: Exception) -> Failed:
    if isinstance(error, ApiError):
        return Failed(error.with_traceback(None))
    logger.exception("run failed error=%s", type(error).__name__)
    return Failed(internal_error())


def _total(ends: Sequence[Finished], per_prompt: int) -> Finished:
    firsts = ends[::per_prompt]
    return msgspec.structs.replace(
        ends[0],
        prompt_tokens=sum(end.prompt_tokens for end in firsts),
        cached_tokens=sum(end.cached_tokens for end in firsts),
        completion_tokens=sum(end.completion_tokens for end in ends),
        reasoning_tokens=sum(end.reasoning_tokens for end in ends),
        decode_ms=max(end.decode_ms for end in ends),
    )
