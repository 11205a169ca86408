"""What ids stand for."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from helexa.bench.identity import digest
from helexa.bench.store.reader import Reader
from helexa.bench.store.rows import BuildRow, HostRow, ModelRow, ScenarioRow, TargetRow


@dataclass(frozen=True, slots=True)
class Names:
    """All of a database's targets, hosts, builds, models and scenarios by their ids.

    Attributes:
        labels: of builds, each different.
    """

    targets: dict[int, TargetRow]
    hosts: dict[int, HostRow]
    builds: dict[int, BuildRow]
    models: dict[int, ModelRow]
    scenarios: dict[int, ScenarioRow]
    labels: dict[int, str]

    @classmethod
    def of(cls, reader: Reader) -> "Names":
        """Read them."""
        builds = {row.id: row for row in reader.builds()}
        return cls(
            {row.id: row for row in reader.targets()},
            {row.id: row for row in reader.hosts()},
            builds,
            {row.id: row for row in reader.models()},
            {row.id: row for row in reader.scenarios()},
            build_labels(builds.values()),
        )


def gpu_label(gpus: list[dict[str, Any]]) -> str:
    """A host's cards in short: `2× RTX 5090 + H100`; empty without any."""
    counts = Counter(str(gpu["name"]).removeprefix("NVIDIA GeForce ").removeprefix("NVIDIA ") for gpu in gpus)
    return " + ".join(name if count == 1 else f"{count}× {name}" for name, count in counts.items())


def hardware_label(host: HostRow) -> str:
    """What a host computes with: its cards, else its processor."""
    return gpu_label(host.gpus) or host.cpu


def build_labels(builds: Collection[BuildRow]) -> dict[int, str]:
    """Each build's commit, or its version where no commit is known, by its id.

    Builds of one commit differ in their libraries or in uncommitted changes, and builds of one version in their engine:
    the label of each of those ends with a hash.
    """
    count = Counter(map(_commit, builds))
    return {
        row.id: name if count[name] == 1 else f"{name}~{digest([row.engine, row.fingerprint])[:6]}"
        for row in builds
        for name in [_commit(row)]
    }


def _commit(build: BuildRow) -> str:
    name = build.sha if build.sha != "external" else build.version or "external"
    return f"{name}+" if build.dirty else name
