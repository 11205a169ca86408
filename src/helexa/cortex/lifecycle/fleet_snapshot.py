"""The fleet snapshot: the state on which load decisions are based."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from helexa.core.catalog import DEFAULT_RESIDENCY, Catalog, Profile
from helexa.cortex.config import EvictionSection
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet_view import FleetView, Node, estimated_mb, is_sleeping, profile_of, shares_memory
from helexa.cortex.lifecycle.load_history import Failure
from helexa.cortex.lifecycle.memory import HOST, Megabytes, reading, totals

ASSUMED_LOAD_MB_PER_SEC = 500.0
ASSUMED_LOAD_SECS = 30.0

_ABSENT_STATUSES = ("unloaded", "sleeping")


@dataclass(frozen=True)
class ResidentModel:
    """In a fleet snapshot: a model that is loaded or loading on a node."""

    model: str
    megabytes: Megabytes  # memory use in MB, by device index
    # `residency_priority` of the model. A model may be evicted only for a model of the same or a higher rank.
    rank: int
    busy: bool  # True if requests for the model are running
    loading: bool  # True until the load has finished
    loaded_at: float | None  # when the load finished (monotonic seconds). None if unknown, which counts as long ago.
    # when requests that had waited for the load were last forwarded to the node; None if never
    awaited_at: float | None
    # the latest of `loaded_at`, `awaited_at` and the time of the last request; None if all are unknown
    used_at: float | None
    reload_secs: float  # measured or estimated duration of a reload in seconds

    def idle_secs(self, now: float) -> float:
        """Return the seconds since the last use; 0 if busy, infinity if unknown."""
        if self.busy:
            return 0.0
        return inf if self.used_at is None else max(0.0, now - self.used_at)


@dataclass(frozen=True)
class FleetSnapshot:
    """All inputs of load and eviction decisions at one moment.

    Attributes:
        view: state of the nodes and their models.
        catalog: the models and aliases that the gateway may load.
        now: current time (monotonic seconds).
        began: when this gateway started (monotonic seconds).
        settings: the eviction section of the configuration.
        expected_free: expected free MB by node name and device index, only for nodes with running or recent loads or
            unloads. For any other node, the free memory that the node last reported is used.
        reserved: MB that running loads will use in addition to what their evictions free, by node name and device
            index, only for nodes with running or recent loads or unloads.
        load_secs, failures, devices, sizes_mb, required_mb, awaited, keep_secs, estimates_mb, saved_prompts: see
            `LoadHistory`.
        requested: ids of the models whose load an administrator has requested.
    """

    view: FleetView
    catalog: Catalog
    now: float = 0.0
    began: float = 0.0
    settings: EvictionSection = field(default_factory=EvictionSection)
    expected_free: Mapping[str, Megabytes] = field(default_factory=dict[str, Megabytes])
    reserved: Mapping[str, Megabytes] = field(default_factory=dict[str, Megabytes])
    load_secs: Mapping[Pair, float] = field(default_factory=dict[Pair, float])
    failures: Mapping[Pair, Failure] = field(default_factory=dict[Pair, Failure])
    devices: Mapping[Pair, tuple[int, ...]] = field(default_factory=dict[Pair, tuple[int, ...]])
    sizes_mb: Mapping[str, int] = field(default_factory=dict[str, int])
    awaited: Mapping[Pair, float] = field(default_factory=dict[Pair, float])
    required_mb: Mapping[Pair, int] = field(default_factory=dict[Pair, int])
    keep_secs: Mapping[str, float] = field(default_factory=dict[str, float])
    requested: frozenset[str] = frozenset()
    estimates_mb: Mapping[str, int] = field(default_factory=dict[str, int])
    saved_prompts: Mapping[Pair, frozenset[str]] = field(default_factory=dict[Pair, frozenset[str]])

    def profile(self, model: str) -> Profile | None:
        """Return the profile to load or wake a model with; None if the fleet has none."""
        return profile_of(self.view, self.catalog, model, requested=model in self.requested)

    def restricted(self, includes: Callable[[str], bool]) -> "FleetSnapshot":
        """Return a snapshot with only the nodes for whose name `includes` returns True."""
        nodes = tuple(node for node in self.view.nodes if includes(node.name))
        return replace(self, view=replace(self.view, nodes=nodes))

    def free(self, node: Node) -> dict[int, int]:
        """Return the free MB of a node by device index. A value may be negative.

        The result is the node's value in `expected_free`, else the free memory that the node last reported, else the
        total memory minus the memory of the node's models and of running loads. From the first two values of main
        memory, the MB that other nodes on the same machine keep for their models are subtracted.
        """
        reported_mb = self.expected_free.get(node.name) or reading(node)
        if reported_mb is not None:
            # A node's reported free memory includes memory that other nodes on the machine have promised to models.
            promised_mb = sum(self._promised_mb(other) for other in self.view.nodes if shares_memory(node, other))
            return {index: free - (promised_mb if index == HOST else 0) for index, free in reported_mb.items()}
        used_mb = [
            resident.megabytes
            for resident in self._present_and_loading(node)
            if (node.name, resident.model) not in self.view.loading
        ]
        used_mb.append(self.reserved.get(node.name, {}))
        return {index: total - sum(used.get(index, 0) for used in used_mb) for index, total in totals(node).items()}

    def _promised_mb(self, node: Node) -> int:
        """Return the unused MB of main memory that a node keeps for its models and loads."""
        health = node.health
        if health is None or health.memory_free_mb is None or health.grantable_mb is None:
            return 0
        return max(0, health.memory_free_mb - health.grantable_mb) + self.reserved.get(node.name, {}).get(HOST, 0)

    def residents(self, node: Node) -> list[ResidentModel]:
        """Return the models on the node, except those about to be unloaded."""
        return [
            resident
            for resident in self._present_and_loading(node)
            if (node.name, resident.model) not in self.view.draining
        ]

    def _present_and_loading(self, node: Node) -> list[ResidentModel]:
        present = [info.id for info in node.models.values() if info.status not in _ABSENT_STATUSES]
        arriving = [model for name, model in self.view.loading if name == node.name]
        arriving += [model for model in node.activating() if self.profile(model) is not None]
        return [
            self._resident(node, model, loading=model in arriving) for model in dict.fromkeys([*present, *arriving])
        ]

    def size_mb(self, node: Node, model: str) -> int:
        """Return the MB that the node reports for a model, else the result of `needs_mb`."""
        info = node.models.get(model)
        reported_mb = None if info is None else info.vram_used_mb if info.granted_mb is None else info.granted_mb
        return max(0, reported_mb) if reported_mb is not None else self.needs_mb(model, node)

    def needs_mb(self, model: str, node: Node | None = None) -> int:
        """Return the MB that a model needs, or 0 if unknown.

        The MB are the first of these values that is known: the catalog's value, a node's estimate from the file
        headers (if possible that of `node`), the last reported memory use, an estimate from the sizes of the files on a
        hub. If `node` has rejected a load of the model because it needs more memory, the MB are at least what the model
        needs there.
        """
        profile = self.profile(model)
        stated = profile.vram_mb if profile is not None else None
        if stated is None:
            stated = self.estimate_mb(model, node)
        needs_mb = self.sizes_mb.get(model, 0) if stated is None else stated
        return needs_mb if node is None else max(needs_mb, self.required_mb.get((node.name, model), 0))

    def estimate_mb(self, model: str, node: Node | None = None) -> int | None:
        """Return the MB that a model's files need.

        None means that the MB are unknown, that the catalog states the model's memory (`vram_mb`), or that no node has
        an estimate from the files but the memory use of the model is known (`sizes_mb`).
        """
        profile = self.profile(model)
        if profile is not None and profile.vram_mb is not None:
            return None
        on_disk = estimated_mb(self.view, profile, model, node)
        if on_disk is not None or model in self.sizes_mb:
            return on_disk
        return self.estimates_mb.get(model) or None

    def idle_ttl_secs(self, model: str) -> float:
        """Return the idle seconds after which a model is unloaded, or infinity."""
        return self.keep_secs.get(model, self.settings.idle_ttl_secs or inf)

    def rank(self, model: str) -> int:
        """Return a model's `residency_priority`.

        A model is never evicted for a model with a lower rank.
        """
        profile = self.profile(model)
        return DEFAULT_RESIDENCY if profile is None else profile.residency_priority or 0

    def measured_load_secs(self, node: str, model: str) -> float | None:
        """Return the model's measured load duration on the node in seconds.

        If no load on this node was measured, the result is the mean of the durations on other nodes. The result is None
        if no load of the model was measured on any node.
        """
        load_secs = self.load_secs.get((node, model))
        if load_secs is not None:
            return load_secs
        elsewhere = [secs for (_, loaded), secs in self.load_secs.items() if loaded == model]
        return sum(elsewhere) / len(elsewhere) if elsewhere else None

    def _resident(self, node: Node, model: str, *, loading: bool) -> ResidentModel:
        pair = (node.name, model)
        size = self.size_mb(node, model)
        devices = self._devices(node, model)
        measured_secs = self.measured_load_secs(node.name, model)
        assumed = max(1.0, size / ASSUMED_LOAD_MB_PER_SEC) if size else ASSUMED_LOAD_SECS
        return ResidentModel(
            model,
            {index: size // len(devices) for index in devices},
            self.rank(model),
            busy=self.view.load(node, model) > 0,
            loading=(loading and (model not in node.models or is_sleeping(node, model))) or _is_loading(node, model),
            loaded_at=self.view.loaded_at.get(pair),
            awaited_at=self.awaited.get(pair),
            used_at=max(
                (times[pair] for times in (self.view.loaded_at, self.awaited, self.view.used_at) if pair in times),
                default=None,
            ),
            reload_secs=assumed if measured_secs is None else measured_secs,
        )

    def _devices(self, node: Node, model: str) -> tuple[int, ...]:
        info = node.models.get(model)
        first_device = next(iter(totals(node)), HOST)
        return tuple(info.devices if info else ()) or self.devices.get((node.name, model)) or (first_device,)


def _is_loading(node: Node, model: str) -> bool:
    info = node.models.get(model)
    return info is not None and info.status == "loading"
