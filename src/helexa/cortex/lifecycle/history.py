"""What loading was like so far: how long it took, where it went, and where it failed."""

from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.picture import FleetView
from helexa.cortex.lifecycle.situation import Failure

BACKOFF_SECS = 5.0
MAX_BACKOFF_SECS = 300.0
PERMANENT_BACKOFF_SECS = 60.0  # longer: every attempt may cost another model its place
MAX_PERMANENT_BACKOFF_SECS = 1800.0


class History:
    """Experience with (node, model) pairs; there are never more of them than nodes times models.

    Attributes:
        load_secs: seconds of the last loads; a new one counts half.
        devices: where the last load went.
        failures: loads whose last attempt failed.
        sizes_mb: what models were last seen to hold, by model.
        awaited: when those who waited for a model were last sent there (seconds of the fleet's clock).
    """

    def __init__(self) -> None:
        self.load_secs: dict[Pair, float] = {}
        self.devices: dict[Pair, tuple[int, ...]] = {}
        self.failures: dict[Pair, Failure] = {}
        self.sizes_mb: dict[str, int] = {}
        self.awaited: dict[Pair, float] = {}

    def look(self, view: FleetView) -> None:
        """Remember what nodes say that their models hold."""
        for node in view.nodes:
            for info in node.models.values():
                if info.vram_used_mb is not None:
                    self.sizes_mb[info.id] = max(0, info.vram_used_mb)

    def loaded(self, pair: Pair, secs: float | None) -> None:
        """A load succeeded, in `secs` if it ran from its beginning."""
        self.failures.pop(pair, None)
        if secs is not None:
            self.load_secs[pair] = (self.load_secs.get(pair, secs) + secs) / 2

    def failed(self, pair: Pair, message: str, now: float, *, temporary: bool) -> Failure:
        """A load failed: it is not tried again for a while, longer each time."""
        times = self.failures[pair].times + 1 if pair in self.failures else 1
        least, most = (
            (BACKOFF_SECS, MAX_BACKOFF_SECS) if temporary else (PERMANENT_BACKOFF_SECS, MAX_PERMANENT_BACKOFF_SECS)
        )
        retry_at = now + min(least * 2 ** min(times - 1, 16), most)
        failure = self.failures[pair] = Failure(message, temporary, times, retry_at)
        return failure
