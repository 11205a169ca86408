"""Records of past loads: durations, devices, model sizes and failures."""

from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet_view import FleetView
from helexa.cortex.lifecycle.fleet_snapshot import Failure

BACKOFF_SECS = 5.0
MAX_BACKOFF_SECS = 300.0
PERMANENT_BACKOFF_SECS = 60.0  # longer, because a permanent failure repeats and every attempt may evict models
MAX_PERMANENT_BACKOFF_SECS = 1800.0


class History:
    """Records of past loads.

    The keys of all mappings except `sizes_mb` are pairs (node name, model id).

    Attributes:
        load_secs: moving average of load durations in seconds. Each new load has the weight 1/2.
        devices: indices of the devices of the last load.
        failures: the last failure, only for pairs whose last load failed.
        sizes_mb: last reported memory use in MB, by model id.
        awaited: when requests that had waited for a load were last forwarded to the model (monotonic seconds).
    """

    def __init__(self) -> None:
        self.load_secs: dict[Pair, float] = {}
        self.devices: dict[Pair, tuple[int, ...]] = {}
        self.failures: dict[Pair, Failure] = {}
        self.sizes_mb: dict[str, int] = {}
        self.awaited: dict[Pair, float] = {}

    def look(self, view: FleetView) -> None:
        """Copy the memory use of each model from the nodes' reports in `view` to `sizes_mb`."""
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

    def forget_failures(self, model: str, node: str | None) -> None:
        """Forget failed loads of the model on the node, or on all nodes, so that the next attempt starts at once."""
        for pair in [pair for pair in self.failures if pair[1] == model and node in (None, pair[0])]:
            del self.failures[pair]

    def failed(self, pair: Pair, message: str, now: float, *, temporary: bool) -> Failure:
        """Record a failed load of the (node, model) pair, and return the record.

        The record contains the earliest time of the next attempt. The delay doubles with each consecutive failure.

        Args:
            pair: the node's name and the model's id.
            message: error message for clients.
            now: monotonic seconds.
            temporary: True if the same load may succeed later. The first delay is then shorter.
        """
        failure_count = self.failures[pair].times + 1 if pair in self.failures else 1
        first_delay_secs, longest_delay_secs = (
            (BACKOFF_SECS, MAX_BACKOFF_SECS) if temporary else (PERMANENT_BACKOFF_SECS, MAX_PERMANENT_BACKOFF_SECS)
        )
        retry_at = now + min(first_delay_secs * 2 ** min(failure_count - 1, 16), longest_delay_secs)
        failure = self.failures[pair] = Failure(message, temporary, failure_count, retry_at)
        return failure
