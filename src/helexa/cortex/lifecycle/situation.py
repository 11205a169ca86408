"""Everything that decisions about loads and evictions look at: the fleet, the catalogue, memory and experience."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from helexa.core.catalogue import DEFAULT_RESIDENCY, Catalogue
from helexa.cortex.config import EvictionSection
from helexa.cortex.fleet.breaker import Pair
from helexa.cortex.fleet.picture import FleetView, Node
from helexa.cortex.lifecycle.memory import HOST, Megabytes, reading, totals

ASSUMED_LOAD_MB_PER_SEC = 500.0
ASSUMED_LOAD_SECS = 30.0

_GONE = ("unloaded",)


@dataclass(frozen=True)
class Failure:
    """A load that failed.

    Attributes:
        temporary: the same load may succeed later.
        times: failures in a row.
        retry_at: it is not tried again before (seconds of the fleet's clock).
    """

    message: str
    temporary: bool
    times: int
    retry_at: float


@dataclass(frozen=True)
class Resident:
    """A model that holds memory on a node, or is about to.

    Attributes:
        megabytes: what it holds, by device.
        rank: displacement class; a model makes room for those of the same class or a higher one.
        busy: it has requests now.
        loading: it is not there yet.
        loaded_at: when it came, None if that is unknown (then it is long ago).
        awaited_at: when those who waited for it were last sent here, None if nobody was.
        used_at: when it last had a request, or was there for one; None if neither is known.
        reload_secs: what bringing it back would cost.
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
        """Seconds without a request; infinite if it never had one."""
        if self.busy:
            return 0.0
        return inf if self.used_at is None else max(0.0, now - self.used_at)


@dataclass(frozen=True)
class Situation:
    """One moment.

    Attributes:
        now: seconds of the fleet's clock.
        began: when this gateway did.
        expected_free: free MB by device, of the nodes where loads or unloads run; elsewhere nodes are believed.
        reserved: MB by device that running loads will take, where nodes do not tell what is free.
        load_secs: measured seconds of the last loads, by (node, model).
        failures: loads that lately failed, by (node, model).
        devices: where loads of this gateway were put, by (node, model).
        sizes_mb: what models were last seen to hold, by model.
        awaited: when those who waited for a model were last sent to where it serves, by (node, model).
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
        """Free MB of every device: expected, else as the node says, else what its models should leave."""
        known = self.expected_free.get(node.name) or reading(node)
        if known is not None:
            return dict(known)
        held = [one.megabytes for one in self._holding(node) if (node.name, one.model) not in self.view.loading]
        held.append(self.reserved.get(node.name, {}))
        return {index: total - sum(one.get(index, 0) for one in held) for index, total in totals(node).items()}

    def residents(self, node: Node) -> list[Resident]:
        """The models that hold memory there, or soon will, without those that are on their way out."""
        return [one for one in self._holding(node) if (node.name, one.model) not in self.view.draining]

    def _holding(self, node: Node) -> list[Resident]:
        there = [info.id for info in node.models.values() if info.status not in _GONE]
        coming = [model for name, model in self.view.loading if name == node.name]
        coming += [model for model in node.activating() if self.catalogue.profile(model) is not None]
        return [self._resident(node, model, loading=model in coming) for model in dict.fromkeys([*there, *coming])]

    def size_mb(self, node: Node, model: str) -> int:
        """What a model holds there: as the node says, else what it needs."""
        info = node.models.get(model)
        reported = info.vram_used_mb if info is not None else None
        return max(0, reported) if reported is not None else self.needs_mb(model)

    def needs_mb(self, model: str) -> int:
        """What a model needs: as the catalogue says, else what it held elsewhere or before; 0 when unknown."""
        profile = self.catalogue.profile(model)
        stated = profile.vram_mb if profile is not None else None
        return self.sizes_mb.get(model, 0) if stated is None else stated

    def rank(self, model: str) -> int:
        """A model's displacement class."""
        profile = self.catalogue.profile(model)
        return DEFAULT_RESIDENCY if profile is None else profile.residency_priority or 0

    def measured_load_secs(self, node: str, model: str) -> float | None:
        """How long the model took to load there, else elsewhere; None when it was never seen."""
        here = self.load_secs.get((node, model))
        if here is not None:
            return here
        elsewhere = [secs for (_, loaded), secs in self.load_secs.items() if loaded == model]
        return sum(elsewhere) / len(elsewhere) if elsewhere else None

    def _resident(self, node: Node, model: str, *, loading: bool) -> Resident:
        pair = (node.name, model)
        size = self.size_mb(node, model)
        devices = self._devices(node, model)
        measured = self.measured_load_secs(node.name, model)
        assumed = max(1.0, size / ASSUMED_LOAD_MB_PER_SEC) if size else ASSUMED_LOAD_SECS
        return Resident(
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
            reload_secs=assumed if measured is None else measured,
        )

    def _devices(self, node: Node, model: str) -> tuple[int, ...]:
        info = node.models.get(model)
        first = next(iter(totals(node)), HOST)
        return tuple(info.devices if info else ()) or self.devices.get((node.name, model)) or (first,)


def _is_loading(node: Node, model: str) -> bool:
    info = node.models.get(model)
    return info is not None and info.status == "loading"
