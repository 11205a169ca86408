"""History of model loads: durations, memory, failures, and when to try again."""

from dataclasses import dataclass

from helexa.core.node_reports import Health
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet_view import FleetView

BACKOFF_SECS = 5.0
MAX_BACKOFF_SECS = 300.0
PERMANENT_BACKOFF_SECS = 60.0  # longer, because a permanent failure repeats and every attempt may evict models
MAX_PERMANENT_BACKOFF_SECS = 1800.0


@dataclass(frozen=True)
class Failure:
    """In the load history: the last failed load of a model on a node."""

    message: str
    temporary: bool  # True if the same load may succeed later
    times: int  # number of consecutive failures, including this one
    retry_at: float  # earliest time of the next attempt (monotonic seconds)


class LoadHistory:
    """Records of past loads.

    The keys of all mappings except `sizes_mb`, `estimates_mb` and `keep_secs` are pairs (node name, model id).
    """

    def __init__(self) -> None:
        # Moving average of load durations in seconds. Each new load has the weight 1/2.
        self.load_secs: dict[Pair, float] = {}
        self.devices: dict[Pair, tuple[int, ...]] = {}  # indices of the devices of the last load
        self.failures: dict[Pair, Failure] = {}  # the last failure, only for pairs whose last load failed
        self.sizes_mb: dict[str, int] = {}  # last reported memory use in MB, by model id
        # MB that a model needs according to the sizes of its files on a hub, by model id; 0 if unknown
        self.estimates_mb: dict[str, int] = {}
        self.required_mb: dict[Pair, int] = {}  # MB that the node required when it rejected a load for lack of memory
        # time (monotonic seconds) at which requests that had waited for the model's load were last forwarded
        self.awaited: dict[Pair, float] = {}
        # seconds without requests after which a model is unloaded, by model id, for models for which a client has set
        # this time (see `Lifecycle.keep`)
        self.keep_secs: dict[str, float] = {}
        # names of the prompts that a model had saved to a node's disk at its last report (see `routing.prefix_name`)
        self.saved_prompts: dict[Pair, frozenset[str]] = {}
        self._health: dict[str, Health] = {}  # the last report that `look` has copied, by node name
        self._replanned: set[Pair] = set()

    def look(self, view: FleetView) -> None:
        """Copy the memory and the saved prompts of each model from the nodes' reports."""
        self.keep_secs = {model: secs for model, secs in self.keep_secs.items() if view.has_model(model)}
        for node in view.nodes:
            for info in node.models.values():
                if info.vram_used_mb is not None:
                    self.sizes_mb[info.id] = max(0, info.vram_used_mb)
            # Copy each report only once: after a call of `forget_prompts`, an older report still lists the deleted
            # prompts.
            if node.health is None or node.health is self._health.get(node.name):
                continue
            self._health[node.name] = node.health
            # A report lacks unloaded and sleeping models, but their prompts stay on the disk. Their entries are kept.
            for load in node.health.models:
                names = load.memory_prefixes | load.disk_prefixes if load.saved_prompts_mb else frozenset[str]()
                self.saved_prompts[node.name, load.id] = names

    def forget_prompts(self, view: FleetView, pair: Pair) -> None:
        """Record that a node has deleted the saved prompts of a model.

        `view` has the nodes' reports from before the deletion. They are copied first, so that a later call of `look`
        does not copy the deleted prompts from them.
        """
        self.look(view)
        self.saved_prompts.pop(pair, None)

    def loaded(self, pair: Pair, secs: float | None) -> None:
        """Record a successful load, with its duration if this gateway started the load."""
        self.failures.pop(pair, None)
        self._replanned.discard(pair)
        if secs is not None:
            self.load_secs[pair] = (self.load_secs.get(pair, secs) + secs) / 2

    def lacks_memory(self, pair: Pair, required_mb: int) -> bool:
        """Record that a node rejected a load because the model needs `required_mb` MB.

        Return True if the load can be planned again at once, because this is the first rejection for lack of memory
        since the last load or failure of the pair.
        """
        self.required_mb[pair] = required_mb
        # After a second rejection in a row, planning with the required memory that the node states does not help.
        is_first = pair not in self._replanned
        self._replanned.add(pair)
        return is_first

    def forget_failures(self, model: str, node: str | None) -> None:
        """Forget failed loads of the model, so that the next attempt starts at once.

        The memory that nodes required for the model is forgotten, too. If `node` is None, this applies to all nodes.
        """
        for pair in [pair for pair in self.failures if pair[1] == model and node in (None, pair[0])]:
            del self.failures[pair]
        for pair in [pair for pair in self.required_mb if pair[1] == model and node in (None, pair[0])]:
            del self.required_mb[pair]  # a new quantization may need less

    def failed(self, pair: Pair, message: str, now: float, *, temporary: bool) -> Failure:
        """Record a failed load; return it with the earliest time of the next attempt.

        The delay before the next attempt doubles with each consecutive failure. The first delay is shorter if
        `temporary` is True, which means that the same load may succeed later.
        """
        self._replanned.discard(pair)
        failure_count = self.failures[pair].times + 1 if pair in self.failures else 1
        first_delay_secs, longest_delay_secs = (
            (BACKOFF_SECS, MAX_BACKOFF_SECS) if temporary else (PERMANENT_BACKOFF_SECS, MAX_PERMANENT_BACKOFF_SECS)
        )
        retry_at = now + min(first_delay_secs * 2 ** min(failure_count - 1, 16), longest_delay_secs)
        failure = self.failures[pair] = Failure(message, temporary, failure_count, retry_at)
        return failure
