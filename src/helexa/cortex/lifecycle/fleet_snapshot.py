"""The fleet snapshot: nodes, catalogue, memory and load history at one moment, as input of load decisions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from helexa.core.catalogue import DEFAULT_RESIDENCY, Catalogue
from helexa.cortex.config import EvictionSection
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.fleet_view import FleetView, Node
from helexa.cortex.lifecycle.memory_estimator import HOST, Megabytes, reading, totals

ASSUMED_LOAD_MB_PER_SEC = 500.0
ASSUMED_LOAD_SECS = 30.0

_ABSENT_STATUSES = ("unloaded",)


@dataclass(frozen=True)
class Failure:
    """The last failed load of a model on a node.

    Attributes:
        message: error message for clients.
        temporary: True if the same load may succeed later.
        times: number of consecutive failures, including this one.
        retry_at: earliest time of the next attempt (monotonic seconds).
    """

    message: str
    temporary: bool
    times: int
    retry_at: float


@dataclass(frozen=True)
class ResidentModel:
    """A model that is loaded or loading on a node.

    Attributes:
        model: the model id.
        megabytes: memory use in MB, by device index.
        rank: `residency_priority` of the model. A model may be evicted only for a model of the same or a higher rank.
        busy: True if requests for the model are running.
        loading: True until the load has finished.
        loaded_at: when the load finished (monotonic seconds). None if unknown, which counts as long ago.
        awaited_at: when requests that had waited for the load were last forwarded to the node; None if never.
        used_at: the latest of `loaded_at`, `awaited_at` and the time of the last request; None if all are unknown.
        reload_secs: measured or estimated duration of a reload in seconds.
    """

    model: str
    megabytes: Megabytes
    rank: int
    busy: bool
    loading: bool
    loaded_at: float | None
    awaited_at: float | None
    used_at: float | None
    reload_secs: float

    def idle_secs(self, now: float) -> float:
        """Return the seconds since the last use: 0 for a busy model, infinity if the last use is unknown."""
        if self.busy:
            return 0.0
        return inf if self.used_at is None else max(0.0, now - self.used_at)


@dataclass(frozen=True)
class FleetSnapshot:
    """All inputs of load and eviction decisions at one moment.

    The keys of mappings "by (node, model)" are pairs (node name, model id). The keys of mappings "by device" are device
    indices.

    Attributes:
        view: state of the nodes and their models.
        catalogue: the models and aliases that the gateway may load.
        now: current time (monotonic seconds).
        began: when this gateway started (monotonic seconds).
        settings: the eviction section of the configuration.
        expected_free: expected free MB by node and device, only for nodes with running or recent loads or unloads. For
            any other node, the free memory that the node last reported is used.
        reserved: MB that running loads will use, by node and device. Needed for nodes that do not report free memory.
        load_secs: measured load durations in seconds, by (node, model).
        failures: recently failed loads, by (node, model).
        devices: indices of the devices that this gateway last loaded the model on, by (node, model).
        sizes_mb: last reported memory use in MB, by model.
        awaited: when requests that had waited for a load were last forwarded to the node, by (node, model).
    """

    view: FleetView
    catalogue: Catalogue
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

    def free(self, node: Node) -> dict[int, int]:
        """Return the free MB of a node by device.

        This is the node's value in `expected_free`, or else the free memory that the node last reported. If both are
        unknown, it is the total memory minus the memory of the node's models and of running loads.
        """
        reported_mb = self.expected_free.get(node.name) or reading(node)
        if reported_mb is not None:
            return dict(reported_mb)
        used_mb = [
            resident.megabytes
            for resident in self._present_and_loading(node)
            if (node.name, resident.model) not in self.view.loading
        ]
        used_mb.append(self.reserved.get(node.name, {}))
        return {index: total - sum(used.get(index, 0) for used in used_mb) for index, total in totals(node).items()}

    def residents(self, node: Node) -> list[ResidentModel]:
        """Return the models that are loaded or loading on the node, except models that are about to be unloaded."""
        return [
            resident
            for resident in self._present_and_loading(node)
            if (node.name, resident.model) not in self.view.draining
        ]

    def _present_and_loading(self, node: Node) -> list[ResidentModel]:
        present = [info.id for info in node.models.values() if info.status not in _ABSENT_STATUSES]
        arriving = [model for name, model in self.view.loading if name == node.name]
        arriving += [model for model in node.activating() if self.catalogue.profile(model) is not None]
        return [
            self._resident(node, model, loading=model in arriving) for model in dict.fromkeys([*present, *arriving])
        ]

    def size_mb(self, node: Node, model: str) -> int:
        """Return the MB that a model uses on the node.

        This is the value that the node reports, or the result of `needs_mb` if the node reports none.
        """
        info = node.models.get(model)
        reported_mb = info.vram_used_mb if info is not None else None
        return max(0, reported_mb) if reported_mb is not None else self.needs_mb(model)

    def needs_mb(self, model: str) -> int:
        """Return the MB that a model needs: the catalogue's value, else the last reported value, else 0."""
        profile = self.catalogue.profile(model)
        stated = profile.vram_mb if profile is not None else None
        return self.sizes_mb.get(model, 0) if stated is None else stated

    def rank(self, model: str) -> int:
        """Return a model's `residency_priority`. A model is never evicted for a model with a lower rank."""
        profile = self.catalogue.profile(model)
        return DEFAULT_RESIDENCY if profile is None else profile.residency_priority or 0

    def measured_load_secs(self, node: str, model: str) -> float | None:
        """Return the model's measured load duration on the node in seconds.

        If no load was measured on the node, return the mean of the durations on other nodes. If no load was measured on
        any node, return None.
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
            loading=(loading and model not in node.models) or _is_loading(node, model),
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
