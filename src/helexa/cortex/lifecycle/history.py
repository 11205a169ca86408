"""Records of past loads: durations, devices, model sizes and failures."""

from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet_view import FleetView
from helexa.cortex.lifecycle.fleet_snapshot import Failure

BACKOFF_SECS = 5.0
MAX_BACKOFF_SECS = 300.0
PERMANENT_BACKOFF_SECS = 60.0  # longer, because a permanent failure repeats and every attempt may evict models
MAX_PERMANENT_BACKOFF_SECS = 1800.0


class History:
    """Records of past loads, by (node, model) unless stated otherwise.

    The number of records is limited to the number of nodes times the number of models.

    Attributes:
        load_secs: moving average of load durations in seconds; each new load has weight 1/2.
        devices: indices of the devices of the last load.
        failures: the last failure, only for (node, model) pairs whose last load failed.
        sizes_mb: last reported memory use, by model.
        awaited: when requests that had waited for the model were last forwarded to it (seconds of the fleet's clock).
    """

    def __init__(self) -> None:
        self.load_secs: dict[Pair, float] = {}
        self.devices: dict[Pair, tuple[int, ...]] = {}
        self.failures: dict[Pair, Failure] = {}
        self.sizes_mb: dict[str, int] = {}
        self.awaited: dict[Pair, float] = {}

    def look(self, view: FleetView) -> None:
        """Store the memory use that nodes report for their models."""
        for node in view.nodes:
            for info in node.models.values():
                if info.vram_used_mb is not None:
                    self.sizes_mb[info.id] = max(0, info.vram_used_mb)

    def loaded(self, pair: Pair, secs: float | None) -> None:
        """Record a successful load.

        `secs` is the duration of the load, or None if this gateway did not start the load.
        """
        self.failures.pop(pair, None)
        if secs is not None:
            self.load_secs[pair] = (self.load_secs.get(pair, secs) + secs) / 2

    def failed(self, pair: Pair, message: str, now: float, *, temporary: bool) -> Failure:
        """Record a failed load and return the failure.

        The retry delay doubles with each consecutive failure of the pair.
        """
        failure_count = self.failures[pair].times + 1 if pair in self.failures else 1
        first_delay_secs, longest_delay_secs = (
            (BACKOFF_SECS, MAX_BACKOFF_SECS) if temporary else (PERMANENT_BACKOFF_SECS, MAX_PERMANENT_BACKOFF_SECS)
        )
        retry_at = now + min(first_delay_secs * 2 ** min(failure_count - 1, 16), longest_delay_secs)
        failure = self.failures[pair] = Failure(message, temporary, failure_count, retry_at)
        return failure
