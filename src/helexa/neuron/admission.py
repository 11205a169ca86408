"""Admission control of one model.

`fair_queue` decides which requests are admitted. This module adds a clock, makes the tasks of requests wait for the
decision, and converts rejections to error responses.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from helexa.core.display import memory_text
from helexa.core.errors import ApiError, overloaded
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.fair_queue import ANONYMOUS, FairQueue, Limits, Reason, Ticket, share_of
from helexa.neuron.options import AdmissionOptions

if TYPE_CHECKING:
    from helexa.core.node_reports import ModelLoad

_OUTPUT_TOKENS = 256  # output tokens for which a request reserves memory; requests with longer output may be preempted


class Admission:
    """Admits requests to a model's batch when KV pages and a slot are free.

    After `close`, every new request is rejected.
    """

    def __init__(
        self, config: AdmissionOptions, engine: EngineClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._engine = engine
        self._clock = clock
        self._queue = FairQueue(_limits_of(config, engine))
        self._used_at = clock()  # when the last request ended, or the engine was loaded
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._closed: ApiError | None = None

    @asynccontextmanager
    async def admit(self, principal: str, prompt_tokens: int, max_tokens: int) -> AsyncIterator["AdmittedRequest"]:
        """Wait for admission, and yield the request; leaving the context frees its slot.

        Args:
            principal: name of the request's principal (API key owner); empty for anonymous requests.
            max_tokens: output limit. KV pages are reserved for at most `_OUTPUT_TOKENS` of these tokens.

        Raises:
            ApiError: the request was rejected at once or after waiting, or `close` was called. Status 413: the prompt
                does not fit in the KV cache. 429: the principal has too many requests. 503: any other reason.
        """
        self.require_open()
        ticket = Ticket(
            principal=principal,
            pages=self._pages(prompt_tokens + min(max_tokens, _OUTPUT_TOKENS)),
            min_pages=self._pages(prompt_tokens + 1),
        )
        try:
            self._update_free_pages()
            self._settle(self._queue.arrive(ticket, self._clock()))
            if ticket.waiting:
                await self._wait(ticket)
            if ticket.rejected is not None:
                raise self._rejection(ticket, ticket.rejected)
            # If the ticket is neither admitted nor rejected, `close` has removed it from the queue.
            if not ticket.admitted:
                self.require_open()
            yield AdmittedRequest(self._queue, ticket, self._pages)
        finally:
            self._update_free_pages()
            self._used_at = self._clock()
            self._settle(self._queue.leave(ticket, self._used_at))

    @property
    def idle_secs(self) -> float:
        """Seconds since the last request ended or the load; 0 if requests run or wait."""
        return 0.0 if self._queue.admitted or self._queue.waiting else max(self._clock() - self._used_at, 0.0)

    def replace_engine(self, engine: EngineClient) -> None:
        """Admit later requests to the batch of `engine`; no request may run or wait now."""
        self._engine, self._used_at = engine, self._clock()
        self._queue.limits = _limits_of(self._config, engine)

    def require_open(self) -> None:
        """If `close` was called, raise the error that was passed to it."""
        if self._closed is not None:
            # The same error object is raised for many requests. `with_traceback` keeps its traceback from growing each
            # time.
            raise self._closed.with_traceback(None)

    def close(self, error: ApiError) -> None:
        """Reject all waiting and later requests with `error`."""
        self._closed = error
        self._settle(self._queue.close())

    def load(self, model: str) -> "ModelLoad":
        """Return a `ModelLoad` with only the admission counts and KV memory filled in."""
        from helexa.core.node_reports import ModelLoad  # needs pydantic, which private engines do not import

        queue, limits = self._queue, self._queue.limits
        self._update_free_pages()
        return ModelLoad(
            id=model,
            in_flight=queue.admitted,
            queue_depth=queue.waiting,
            max_in_flight=limits.slots,
            max_queue_depth=limits.queue,
            anon_in_flight=queue.admitted_of(ANONYMOUS),
            anon_max_in_flight=limits.anon_slots,
            kv_budget_mb=self._mb(limits.pages),
            kv_available_mb=self._mb(queue.available),
            rejected_queue_full=queue.rejections[Reason.QUEUE_FULL],
            rejected_timeout=queue.rejections[Reason.TIMEOUT],
            rejected_per_principal=queue.rejections[Reason.PER_PRINCIPAL],
            rejected_anon_yield=queue.rejections[Reason.ANON_YIELD],
            rejected_kv_timeout=queue.rejections[Reason.KV_TIMEOUT],
            rejected_kv_unservable=queue.rejections[Reason.KV_UNSERVABLE],
        )

    async def _wait(self, ticket: Ticket) -> None:
        self._waiters[ticket] = asyncio.get_running_loop().create_future()
        try:
            await self._waiters[ticket]
        finally:
            del self._waiters[ticket]

    def _settle(self, tickets: list[Ticket]) -> None:
        """Wake the tasks that wait for `tickets`; set the timer for the queue's next tick."""
        for ticket in tickets:
            waiter = self._waiters.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        now = self._clock()
        due = self._queue.next_tick(now)
        if self._timer is not None and (due is None or due < self._due):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and due is not None:
            self._due = due
            self._timer = asyncio.get_running_loop().call_later(max(due - now, 0.0), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._update_free_pages()
        self._settle(self._queue.tick(self._clock()))

    def _update_free_pages(self) -> None:
        self._queue.free = self._engine.free_pages

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._engine.ready.page_size)

    def _mb(self, pages: int) -> int:
        ready = self._engine.ready
        return math.ceil(pages * ready.kv_bytes / max(ready.kv_pages, 1) / 2**20)

    def _rejection(self, ticket: Ticket, reason: Reason) -> ApiError:
        queue, limits = self._queue, self._queue.limits
        retry = queue.retry_after(self._clock())
        now = f"{queue.admitted} of {limits.slots} requests run, {queue.waiting} of {limits.queue} wait"
        match reason:
            case Reason.QUEUE_FULL:
                return overloaded(f"the model's queue is full (max_queue_depth): {now}; retry in {retry} s", retry)
            case Reason.TIMEOUT:
                return overloaded(
                    f"the model was busy for {limits.wait:g} s (max_wait_secs): {now}; retry in {retry} s", retry
                )
            case Reason.PER_PRINCIPAL:
                text = (
                    f"one key may have {limits.per_principal} requests at a model at once (max_per_principal); "
                    "wait until one of the requests ends"
                )
                return overloaded(text, retry, status=429)
            case Reason.ANON_YIELD if not limits.anon_slots:
                return overloaded(
                    "the model is for requests with an API key only; send the request through a gateway, with a key",
                    retry,
                )
            case Reason.ANON_YIELD:
                return overloaded(
                    f"the model is busy, and requests with an API key go first: {now}; retry in {retry} s", retry
                )
            case Reason.KV_TIMEOUT:
                free, required = self._mb(queue.available), self._mb(ticket.pages)
                return ApiError(
                    503,
                    "insufficient_vram",
                    f"the request needs {memory_text(required)} of KV cache, and {memory_text(free)} are free after "
                    f"{limits.kv_wait:g} s; retry in {retry} s",
                    type="api_error",
                    retry_after=retry,
                    free_mb=free,
                    required_mb=required,
                )
            case Reason.KV_UNSERVABLE:
                budget, required = self._mb(limits.pages), self._mb(ticket.min_pages)
                return ApiError(
                    413,
                    "prompt_too_long_for_vram",
                    f"the prompt needs {memory_text(required)} of KV cache, and the model has {memory_text(budget)}; "
                    "shorten the prompt",
                    param="messages",
                    required_mb=required,
                    budget_mb=budget,
                )


class AdmittedRequest:
    """The slot that an admitted request occupies in the model's running batch."""

    def __init__(self, queue: FairQueue, ticket: Ticket, pages: Callable[[int], int]) -> None:
        self._queue = queue
        self._ticket = ticket
        self._pages = pages

    def hold(self, tokens: int) -> None:
        """Record that the engine has allocated KV pages for `tokens` tokens in total."""
        self._queue.hold(self._ticket, self._pages(tokens))


def _limits_of(config: AdmissionOptions, engine: EngineClient) -> Limits:
    """Return a model's admission limits, from `config` and the size of its engine."""
    most = engine.options.max_sequences
    slots = min(config.max_in_flight or most, most)
    anon_slots = share_of(slots) if config.anon_max_in_flight is None else min(config.anon_max_in_flight, slots)
    anon_pending = max(slots + config.max_queue_depth - 1, 1)
    return Limits(
        slots=slots,
        queue=config.max_queue_depth,
        wait=config.max_wait_secs,
        kv_wait=config.kv_max_wait_secs,
        per_principal=config.max_per_principal,
        anon_slots=anon_slots,
        anon_pending=anon_pending if config.anon_max_pending is None else config.anon_max_pending,
        pages=engine.ready.kv_pages,
    )
