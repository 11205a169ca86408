"""Several answers to one prompt, as one stream of events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

import msgspec

from helexa.core.errors import ApiError, internal_error
from helexa.neuron.events import Failed, Finished, InferenceEvent, OfChoice, Started

logger = logging.getLogger(__name__)

_HELD = 4  # events of each run that may wait for a slow reader


async def all_choices(
    runs: Sequence[AsyncGenerator[InferenceEvent, None]],
) -> AsyncGenerator[InferenceEvent, None]:
    """Run all at once and say whose each event is; closing the iterator cancels them.

    The others begin when the first has read the prompt, which they then find in the KV cache. One that fails fails all.
    The last event counts the tokens of all, and the prompt once.

    Raises:
        ApiError: before the first event only: the first run was refused. Later refusals are a `Failed` event.
    """
    events: asyncio.Queue[tuple[int, InferenceEvent]] = asyncio.Queue(_HELD * len(runs))
    tasks: list[asyncio.Task[None]] = []
    ends: dict[int, Finished] = {}

    def begin(first: int, last: int) -> None:
        tasks.extend([asyncio.create_task(_pump(index, runs[index], events)) for index in range(first, last)])

    try:
        yield await anext(runs[0])
        begin(0, 1)
        while len(ends) < len(runs):
            index, event = await events.get()
            if isinstance(event, Failed):
                yield event
                return
            if isinstance(event, Finished):
                ends[index] = event
            if not isinstance(event, Started | OfChoice):
                yield OfChoice(index, event)
            if len(tasks) == 1:
                begin(1, len(runs))
        yield _total([ends[index] for index in range(len(runs))])
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for run in runs:
            await run.aclose()


async def _pump(
    index: int, run: AsyncGenerator[InferenceEvent, None], events: asyncio.Queue[tuple[int, InferenceEvent]]
) -> None:
    try:
        async for event in run:
            await events.put((index, event))
    except ApiError as error:
        await events.put((index, Failed(error.with_traceback(None))))
    except Exception as error:
        logger.exception("run failed error=%s", type(error).__name__)
        await events.put((index, Failed(internal_error())))


def _total(ends: Sequence[Finished]) -> Finished:
    return msgspec.structs.replace(
        ends[0],
        completion_tokens=sum(end.completion_tokens for end in ends),
        reasoning_tokens=sum(end.reasoning_tokens for end in ends),
        decode_ms=max(end.decode_ms for end in ends),
    )
