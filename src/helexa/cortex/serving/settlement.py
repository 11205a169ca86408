"""Settles the charge of a request: before the end of the response is sent to the client."""

import asyncio
import logging
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from helexa.core.errors import ApiError
from helexa.cortex.forwarding.node_calls import NodeCalls
from helexa.cortex.ledger.reservation import Reservation
from helexa.cortex.observability.request_record import UPSTREAM_TIMEOUT, Exchange
from helexa.cortex.requests.request import Question
from helexa.cortex.usage.meter import Usage

log = logging.getLogger(__name__)


class Bill:
    """Settlement of one request. The context manager settles on every code path.

    * A complete response is charged by the usage that it states.
    * A response that broke off, or whose client disconnected, is charged by the usage that the node reports on request.
      Without a report, the prompt and the output are estimated, and the ledger entry is marked as estimated.
    * A request that timed out in the gateway is charged by the usage that the node reports; without a report it is
      free.
    * A request that no node answered, or that was rejected, is free.

    A key with a cap is never charged more than the reserved tokens, regardless of the usage that a node reports.
    """

    def __init__(self, reservation: Reservation, question: Question, exchange: Exchange, calls: NodeCalls) -> None:
        self._reservation = reservation
        self._question = question
        self._exchange = exchange
        self._calls = calls

    async def settle(self) -> None:
        """Charge the usage that the response states, if it has stated it."""
        exchange = self._exchange
        if exchange.usage is None and exchange.meter is not None:
            exchange.usage = exchange.meter.usage()
            if exchange.usage is not None:
                await self._pay(exchange.usage)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.settle()
        exchange = self._exchange
        answered = exchange.meter is not None
        hung_up = isinstance(error, asyncio.CancelledError)
        timed_out = isinstance(error, ApiError) and error.code == UPSTREAM_TIMEOUT
        if exchange.usage is None and exchange.target is not None and (answered or hung_up or timed_out):
            try:
                exchange.usage = await self._calls.usage(exchange.target, exchange.usage_id, answered=answered)
            finally:
                if exchange.usage is None and (answered or hung_up):
                    exchange.usage, exchange.estimated = self._estimate(), True
                if exchange.usage is not None:
                    await self._pay(exchange.usage)
        await self._reservation.release()

    def _estimate(self) -> Usage:
        produced = self._exchange.meter.estimated_tokens() if self._exchange.meter else 0
        held = self._reservation.tokens
        prompt = min(self._question.prompt_estimate, held)
        return Usage(prompt, min(produced, held - prompt))

    async def _pay(self, usage: Usage) -> None:
        held = self._reservation.tokens
        if self._question.enforced is not None and usage.prompt + usage.completion > held:
            log.warning(
                "node=%s reports more tokens than it was allowed: prompt=%d completion=%d held=%d",
                self._exchange.node,
                usage.prompt,
                usage.completion,
                held,
            )
            prompt = min(usage.prompt, held)
            usage = replace(usage, prompt=prompt, completion=held - prompt)
        await self._reservation.settle(
            usage.prompt,
            usage.completion,
            cached=usage.cached,
            node=self._exchange.node,
            estimated=self._exchange.estimated,
        )
