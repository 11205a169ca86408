"""From a request to its completion, at any target: one, several, or a whole batch of them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

from helexa.generation.completion import Completion, Delta, Timings
from helexa.generation.errors import EngineError, GenerationError, UnreachableError
from helexa.generation.request import Request
from helexa.generation.target import End, Target, WasThought

Result = Completion | GenerationError

_MOST_SUSPECTS = 256  # that were broken off by a failure and are asked once more, each alone


async def pieces(target: Target, request: Request) -> AsyncGenerator[Delta | Completion, None]:
    """The pieces of an answer as they come, then the completion. Closing the generator ends the answer.

    Raises:
        HelexaError: the model cannot be had.
        GenerationError: there is no answer, or it is not what its schema asks for.
    """
    started_at = time.perf_counter()
    await target.open()
    opened_at = time.perf_counter()
    first_at = last_at = 0.0
    text: list[str] = []
    reasoning: list[str] = []
    async with aclosing(target.answer(request)) as events:
        async for event in events:
            match event:
                case Delta():
                    last_at = time.perf_counter()
                    first_at = first_at or last_at
                    (reasoning if event.thought else text).append(event.text)
                    yield event
                case WasThought():
                    reasoning += text
                    text.clear()
                case End():
                    now = time.perf_counter()
                    first_at, last_at = first_at or now, last_at or now
                    timings = _timings(event, started_at, opened_at, first_at, last_at, now)
                    completion = _completion(request, event, "".join(text), "".join(reasoning), timings)
                    if request.schema is not None:
                        completion = replace(completion, parsed=request.schema.parsed(completion))
                    yield completion
                    return
    raise EngineError("the answer broke off before it was complete", retryable=True)


async def complete(target: Target, request: Request) -> Completion:
    """The whole answer; raises what `pieces` raises."""
    return await _leading(target, request, asyncio.Event())


async def several(target: Target, requests: Sequence[Request]) -> Completion:
    """Several answers to one prompt: the first completion, with the others.

    The others begin when the first has read the prompt, which they then find in the KV cache.

    Raises:
        GenerationError: one of them failed, which ended the others.
    """
    prompt_read = asyncio.Event()
    first_task = asyncio.create_task(_leading(target, requests[0], prompt_read))
    completions: dict[int, Completion] = {}
    try:
        await prompt_read.wait()
        async with aclosing(results(target, requests[1:], target.width)) as answers:
            async for index, result in answers:
                if isinstance(result, GenerationError):
                    raise result
                completions[index] = result
        return replace(await first_task, others=tuple(completions[index] for index in sorted(completions)))
    finally:
        first_task.cancel()
        await asyncio.wait([first_task])


async def results(
    target: Target, requests: Iterable[Request | GenerationError], width: int
) -> AsyncGenerator[tuple[int, Result], None]:
    """What becomes of each request, with its place, as it becomes known; requests are drawn as there is room for them.

    An engine that fails takes with it all that it was at. Those are asked once more in the end, each alone, so that one
    that brings engines down costs only itself.

    Args:
        requests: errors among them are results already.
        width: requests that run at once.

    Raises:
        HelexaError: the model cannot be had.
        UnreachableError: there is no server, and there was none.
    """
    await target.open()
    pending = enumerate(requests)
    suspects: list[tuple[int, Request]] = []
    outcomes: asyncio.Queue[tuple[int, Result] | Exception | None] = asyncio.Queue(width)

    async def work() -> None:
        for index, request in pending:
            result = request if isinstance(request, GenerationError) else await _result(target, request)
            engine_failed = result is not request and isinstance(result, GenerationError) and result.retryable
            if engine_failed and len(suspects) < _MOST_SUSPECTS and isinstance(request, Request):
                suspects.append((index, request))
            else:
                await outcomes.put((index, result))

    async def work_all() -> None:
        workers = [asyncio.create_task(work()) for _ in range(width)]
        try:
            await asyncio.gather(*workers)
            for index, request in suspects:
                await outcomes.put((index, await _result(target, request)))
            await outcomes.put(None)
        except Exception as error:
            await outcomes.put(error)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)

    worker_task = asyncio.create_task(work_all())
    try:
        while (item := await outcomes.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        worker_task.cancel()
        await asyncio.wait([worker_task])


async def _leading(target: Target, request: Request, read: asyncio.Event) -> Completion:
    try:
        async with aclosing(pieces(target, request)) as events:
            async for event in events:
                read.set()
                if isinstance(event, Completion):
                    return event
    finally:
        read.set()
    raise AssertionError("unreachable: `pieces` ends with a completion or raises")


async def _result(target: Target, request: Request) -> Result:
    try:
        return await complete(target, request)
    except UnreachableError as error:
        if not error.retryable:
            raise  # it would be the same for all
        return error
    except GenerationError as error:
        return error


def _timings(end: End, begun: float, opened: float, first: float, last: float, now: float) -> Timings:
    waited_secs = first - opened
    prefill = waited_secs if end.prefill_s is None else min(end.prefill_s, waited_secs)
    return Timings(
        load_s=opened - begun,
        queue_s=waited_secs - prefill,
        prefill_s=prefill,
        ttft_s=first - begun,
        decode_s=last - first if end.decode_s is None else end.decode_s,
        total_s=now - begun,
    )


def _completion(request: Request, end: End, text: str, reasoning: str, timings: Timings) -> Completion:
    return Completion(
        text=text,
        reasoning=reasoning,
        finish_reason=end.reason,
        usage=end.usage,
        timings=timings,
        model=end.model,
        seed=request.seed,
        device=end.device,
        dtype=end.dtype,
    )
