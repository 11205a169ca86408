"""How a request is paid for: held before it is asked, settled before its end is passed on."""

import asyncio
from types import TracebackType
from typing import Self

from helexa.cortex.exchange import Exchange
from helexa.cortex.ledger.reservation import Reservation
from helexa.cortex.meter import Usage
from helexa.cortex.question import Question


class Bill:
    """The bill of one request. As a context manager it is closed however the request ends.

    * An answer that came to its end is settled with what the node counted.
    * One that broke off, or whose client hung up, is settled with what can be told: the prompt's estimate, and a token
      for each event with content; it is marked as estimated.
    * What no node answered, or was refused, costs nothing.
    """

    def __init__(self, reservation: Reservation, question: Question, exchange: Exchange) -> None:
        self._reservation = reservation
        self._question = question
        self._exchange = exchange

    async def settle(self) -> None:
        """Pay what the node says was used, if it has said so."""
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
        if exchange.usage is None:
            hung_up = isinstance(error, asyncio.CancelledError) and exchange.waited is not None
            if exchange.meter is not None or hung_up:
                produced = exchange.meter.produced if exchange.meter else 0
                exchange.usage, exchange.estimated = Usage(self._question.prompt_estimate, produced), True
                await self._pay(exchange.usage)
        await self._reservation.release()

    async def _pay(self, usage: Usage) -> None:
        await self._reservation.settle(
            usage.prompt,
            usage.completion,
            cached=usage.cached,
            node=self._exchange.node,
            estimated=self._exchange.estimated,
        )
