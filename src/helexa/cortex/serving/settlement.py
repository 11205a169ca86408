"""Charges a request's tokens to its key, before the end of the response is sent to the client."""

import asyncio
import logging
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from helexa.core.errors import ApiError
from helexa.cortex.forwarding.node_calls import NodeCalls
from helexa.cortex.ledger.reservation import Reservation
from helexa.cortex.observability.request_record import UPSTREAM_TIMEOUT, RequestRecord
from helexa.cortex.requests.request import ClientRequest
from helexa.cortex.usage.meter import Usage

log = logging.getLogger(__name__)


class Settlement:
    """Context manager that charges one request to its key, and releases its budget reservation on every code path.

    The charge depends on how the request ended:

    * For a complete response, the token counts in the response are charged.
    * If the response is incomplete, or the client disconnected, the gateway requests the token counts from the node and
      charges them. If the node reports none, the gateway charges an estimate and marks the ledger entry as estimated.
    * If the node timed out, the gateway requests the token counts from the node and charges them. If the node reports
      none, the request is free.
    * If the request was rejected or got no response from a node, it is free.

    A key with a cap is never charged more tokens than were reserved, even if a node reports more.
    """

    def __init__(
        self, reservation: Reservation, request: ClientRequest, record: RequestRecord, calls: NodeCalls
    ) -> None:
        self._reservation = reservation
        self._request = request
        self._record = record
        self._calls = calls

    async def settle(self) -> None:
        """Charge the token counts that the response contains.

        If the response contains no token counts, or the request is already charged, this method does nothing.
        """
        record = self._record
        if record.usage is None and record.meter is not None:
            record.usage = record.meter.usage()
            if record.usage is not None:
                await self._charge(record.usage)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.settle()
        record = self._record
        answered = record.meter is not None
        client_gone = isinstance(error, asyncio.CancelledError)
        timed_out = isinstance(error, ApiError) and error.code == UPSTREAM_TIMEOUT
        if record.usage is None and record.target is not None and (answered or client_gone or timed_out):
            try:
                record.usage = await self._calls.usage(record.target, record.usage_id, answered=answered)
            finally:
                if record.usage is None and (answered or client_gone):
                    record.usage, record.estimated = self._estimate(), True
                if record.usage is not None:
                    await self._charge(record.usage)
        await self._reservation.release()

    def _estimate(self) -> Usage:
        produced_tokens = self._record.meter.estimated_tokens() if self._record.meter else 0
        reserved = self._reservation.tokens
        prompt = min(self._request.prompt_estimate, reserved)
        return Usage(prompt, min(produced_tokens, reserved - prompt))

    async def _charge(self, usage: Usage) -> None:
        reserved = self._reservation.tokens
        if self._request.enforced is not None and usage.prompt + usage.completion > reserved:
            log.warning(
                "node=%s reports more tokens than were reserved: prompt=%d completion=%d reserved=%d",
                self._record.node,
                usage.prompt,
                usage.completion,
                reserved,
            )
            prompt = min(usage.prompt, reserved)
            usage = replace(usage, prompt=prompt, completion=reserved - prompt)
        await self._reservation.settle(
            usage.prompt,
            usage.completion,
            cached=usage.cached,
            node=self._record.node,
            estimated=self._record.estimated,
        )
