"""Runs requests on a target: one request, several for one prompt, or a batch."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

from helexa.generation.completion import Completion, Delta, Timings, TokenLogprob
from helexa.generation.errors import EngineError, GenerationError, SchemaError, UnreachableError
from helexa.generation.request import Request
from helexa.generation.target import End, Target, WasThought
from helexa.generation.tools import ToolCallDelta, ToolCallReader

Result = Completion | GenerationError

_MAX_SUSPECTS = 256  # maximum number of failed requests that a batch repeats


async def pieces(target: Target, request: Request) -> AsyncGenerator[Delta | Completion, None]:
    """Run a request, and yield the chunks of its response as they arrive.

    The last item is the complete response. Closing the generator cancels the request.

    Raises:
        HelexaError: the model could not be downloaded or loaded.
        GenerationError or a subclass: the request failed, or the response does not match the request's schema.
    """
    started_at = time.perf_counter()
    await target.open()
    opened_at = time.perf_counter()
    first_at = last_at = 0.0
    text: list[str] = []
    reasoning: list[str] = []
    logprobs: list[TokenLogprob] = []
    calls = ToolCallReader()
    async with aclosing(target.run(request)) as events:
        async for event in events:
            match event:
                case Delta():
                    last_at = time.perf_counter()
                    first_at = first_at or last_at
                    (reasoning if event.thought else text).append(event.text)
                    logprobs += event.logprobs
                    if event.text:  # the last chunk may have only log-probabilities
                        yield event
                case ToolCallDelta():
                    last_at = time.perf_counter()
                    first_at = first_at or last_at
                    calls.add(event)
                case WasThought():
                    reasoning += text
                    text.clear()
                    logprobs.clear()
                case End():
                    now = time.perf_counter()
                    first_at, last_at = first_at or now, last_at or now
                    timings = _timings(event, started_at, opened_at, first_at, last_at, now)
                    completion = _completion(request, event, "".join(text), "".join(reasoning), timings)
                    completion = replace(completion, logprobs=tuple(logprobs))
                    try:
                        completion = replace(completion, tool_calls=calls.calls())
                    except ValueError as error:
                        raise SchemaError(str(error), completion) from None
                    if request.schema is not None and not completion.tool_calls:
                        completion = replace(completion, parsed=request.schema.parsed(completion))
                    yield completion
                    return
    raise EngineError("the answer broke off before it was complete; try again", retryable=True)


async def complete(target: Target, request: Request) -> Completion:
    """Run a request and return its completion.

    The function raises the same errors as `pieces`.
    """
    return await _complete_and_signal(target, request, asyncio.Event())


async def complete_choices(target: Target, requests: Sequence[Request]) -> Completion:
    """Run requests with the same prompt; return the completion of the first one.

    The attribute `others` of the returned completion contains the completions of the other requests. To reuse the KV
    pages of the first request, the other requests start only after its prefill.

    Raises:
        GenerationError: one of the requests failed. All other requests are then canceled.
    """
    prefilled = asyncio.Event()
    first_task = asyncio.create_task(_complete_and_signal(target, requests[0], prefilled))
    completions: dict[int, Completion] = {}
    try:
        await prefilled.wait()
        async with aclosing(results(target, requests[1:], target.width)) as further_results:
            async for index, result in further_results:
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
    """Run requests concurrently.

    When a request ends, yield its index and its completion or error.

    `requests` is read lazily. If the engine crashes, all requests that are running at that time fail. So requests that
    fail with a retryable error, at most `_MAX_SUSPECTS`, are repeated once, one at a time after all other requests. If
    the engine crashes again, the request that runs at that time is the cause, and its result is the error.

    Args:
        target: the server or private engine that runs the model.
        requests: requests to run. If an item is an error instead of a request, the error is yielded as its result.
        width: number of concurrent requests.

    Raises:
        HelexaError: the model could not be downloaded or loaded.
        UnreachableError: the server cannot be reached, and has never responded to this process.
    """
    await target.open()
    pending = enumerate(requests)
    suspects: list[tuple[int, Request]] = []
    outcomes: asyncio.Queue[tuple[int, Result] | Exception | None] = asyncio.Queue(width)

    async def work() -> None:
        for index, request in pending:
            result = request if isinstance(request, GenerationError) else await _result(target, request)
            engine_failed = result is not request and isinstance(result, GenerationError) and result.retryable
            if engine_failed and len(suspects) < _MAX_SUSPECTS and isinstance(request, Request):
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


async def _complete_and_signal(target: Target, request: Request, prefilled: asyncio.Event) -> Completion:
    try:
        async with aclosing(pieces(target, request)) as events:
            async for event in events:
                prefilled.set()
                if isinstance(event, Completion):
                    return event
    finally:
        prefilled.set()
    raise AssertionError("unreachable: `pieces` ends with a completion or raises")


async def _result(target: Target, request: Request) -> Result:
    try:
        return await complete(target, request)
    except UnreachableError as error:
        if not error.retryable:
            raise  # all other requests would fail in the same way
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
