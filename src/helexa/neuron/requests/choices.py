"""Run several answers of one request concurrently and merge their events into one event stream."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from helexa.core.errors import ApiError, internal_error
from helexa.neuron.events import ChoiceEvent, Failed, Finished, InferenceEvent, PromptCounted, Started

logger = logging.getLogger(__name__)

Run = AsyncGenerator[InferenceEvent, None]

_MOST_BUFFERED = 4  # events of each run that may wait for a slow client
_MOST_ACTIVE = 16  # largest number of concurrent runs of one request


async def all_choices(runs: Sequence[Callable[[], Run]], per_prompt: int) -> AsyncGenerator[InferenceEvent, None]:
    """Run all answers of a request and yield their events, each with the index of its answer.

    At most `_MOST_ACTIVE` runs are active at the same time. The first run starts alone. The other runs start after its
    prefill, because its prompt is then in the prefix cache. If one run fails, a `Failed` event ends the stream.
    Otherwise the last event contains the sums of the token counts, in which each prompt counts once. Closing the
    iterator cancels all runs.

    Args:
        runs: functions that each start the run of one answer. If admission control rejects a run while other runs are
            active, the run is started again later.
        per_prompt: number of consecutive runs that have the same prompt.

    Raises:
        ApiError: the first run was rejected. The error is raised before the first event.
    """
    events: asyncio.Queue[tuple[int, InferenceEvent]] = asyncio.Queue(_MOST_BUFFERED * len(runs))
    tasks: list[asyncio.Task[None]] = []
    ends: dict[int, Finished] = {}
    active = _ActiveRuns()
    first = runs[0]()
    try:
        yield await anext(first)
        active.count += 1
        tasks.append(asyncio.create_task(_pump(0, first, events, active)))
        while len(ends) < len(runs):
            index, event = await events.get()
            if isinstance(event, Failed):
                yield event
                return
            if isinstance(event, Finished):
                ends[index] = event
            if not isinstance(event, Started | PromptCounted | ChoiceEvent):
                yield ChoiceEvent(index, event)
            if len(tasks) == 1:
                later = [_begin(place, run, events, active) for place, run in enumerate(runs) if place]
                tasks += map(asyncio.create_task, later)
        yield _total([ends[index] for index in range(len(runs))], per_prompt)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await first.aclose()


class _ActiveRuns:
    """Counts the active runs of one request.

    Attributes:
        count: number of active runs.
        ended: event that is set when one of the active runs ends. A new event then replaces it.
    """

    def __init__(self) -> None:
        self.count = 0
        self.ended = asyncio.Event()

    def leave(self) -> None:
        """Record that a run has ended, and wake the tasks that wait for `ended`."""
        self.count -= 1
        self.ended.set()
        self.ended = asyncio.Event()


Events = asyncio.Queue[tuple[int, InferenceEvent]]


async def _begin(index: int, begin: Callable[[], Run], events: Events, active: _ActiveRuns) -> None:
    """Wait until fewer than `_MOST_ACTIVE` runs are active, then start a run and forward its events to the queue.

    A run that admission control rejects is started again when another run of the request has ended.

    Args:
        index: index of the run's answer.
        begin: function that starts the run.
        events: queue for the events of all runs.
        active: the active runs of the request.
    """
    while True:
        while active.count >= _MOST_ACTIVE:
            await active.ended.wait()
        active.count += 1
        async with aclosing(begin()) as run:
            run_ended = active.ended
            try:
                event = await anext(run)
            except Exception as error:
                active.count -= 1
                # Other runs of this request occupy slots, or did so until just now.
                has_others = active.count or run_ended.is_set()
                if not (has_others and isinstance(error, ApiError) and error.retry_after is not None):
                    await events.put((index, _failed(error)))
                    return
            else:
                await events.put((index, event))
                await _pump(index, run, events, active)
                return
        await run_ended.wait()


async def _pump(index: int, run: Run, events: Events, active: _ActiveRuns) -> None:
    """Forward the events of the active run `run` to the queue `events` until the run ends."""
    try:
        async for event in run:
            await events.put((index, event))
    except Exception as error:
        await events.put((index, _failed(error)))
    finally:
        active.leave()


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
        image_tokens=sum(end.image_tokens for end in firsts),
        completion_tokens=sum(end.completion_tokens for end in ends),
        reasoning_tokens=sum(end.reasoning_tokens for end in ends),
        decode_ms=max(end.decode_ms for end in ends),
    )
