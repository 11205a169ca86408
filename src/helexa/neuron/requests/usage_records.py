"""Keep token counts of recent requests, for gateways whose connection broke before they received the counts."""

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from helexa.neuron.requests.request_record import RunRecord

KEPT_SECONDS = 120.0
MOST_KEPT = 10_000

_HEADER = b"x-helexa-usage-id"
_ID = re.compile(rb"[0-9a-f]{32}")


@dataclass(frozen=True)
class UsageRecord:
    """Token counts of one request. If the request has several answers, its prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def total(cls, runs: Iterable[RunRecord]) -> "UsageRecord":
        """Return the total token counts of a request with the given runs. Runs that were never admitted count 0."""
        begun = [run for run in runs if run.admitted]
        return cls(
            max((run.prompt_tokens for run in begun), default=0),
            sum(run.completion_tokens for run in begun),
            max((run.cached_tokens for run in begun), default=0),
        )


class UsageRecords:
    """Token counts of recent requests, by the usage id that a gateway assigned to each request.

    A usage id begins with a secret of the gateway, so other clients cannot read the record. A record is kept for
    `KEPT_SECONDS`, and at most `MOST_KEPT` records are kept.
    """

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Event] = {}
        self._ended: OrderedDict[str, tuple[float, UsageRecord]] = OrderedDict()

    def begin(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Register a request that starts. Return the usage id in its headers, or an empty string if it has none."""
        for name, value in headers:
            if name == _HEADER and _ID.fullmatch(value):
                usage_id = value.decode()
                self._running[usage_id] = asyncio.Event()
                return usage_id
        return ""

    def end(self, usage_id: str, runs: Iterable[RunRecord]) -> None:
        """Store the token counts of a request that ended."""
        now = time.monotonic()
        self._ended[usage_id] = now, UsageRecord.total(runs)
        if running := self._running.pop(usage_id, None):
            running.set()
        while len(self._ended) > MOST_KEPT or now - next(iter(self._ended.values()))[0] > KEPT_SECONDS:
            self._ended.popitem(last=False)

    async def find(self, usage_id: str) -> UsageRecord | None:
        """Wait for the end of the request with this usage id. Return its token counts, or None if the id is unknown."""
        running = self._running.get(usage_id)
        if running is not None:
            await running.wait()
        entry = self._ended.get(usage_id)
        return None if entry is None else entry[1]
