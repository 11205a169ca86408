"""Names by database id."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from helexa.bench.identity import digest
from helexa.bench.store.reader import Reader
from helexa.bench.store.rows import BuildRow, HostRow, ModelRow, ScenarioRow, TargetRow


@dataclass(frozen=True, slots=True)
class Names:
    """All targets, hosts, builds, models and scenarios of a database by id.

    Attributes:
        labels: unique labels of builds by id.
    """

    targets: dict[int, TargetRow]
    hosts: dict[int, HostRow]
    builds: dict[int, BuildRow]
    models: dict[int, ModelRow]
    scenarios: dict[int, ScenarioRow]
    labels: dict[int, str]

    @classmethod
    def read(cls, reader: Reader) -> "Names":
        """Read all names from the database."""
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
    """Return a short text of a host's accelerators: `2× RTX 5090 + H100`; empty without accelerators."""
    counts = Counter(str(gpu["name"]).removeprefix("NVIDIA GeForce ").removeprefix("NVIDIA ") for gpu in gpus)
    return " + ".join(name if count == 1 else f"{count}× {name}" for name, count in counts.items())


def hardware_label(host: HostRow) -> str:
    """Return the accelerators of a host, else its processor."""
    return gpu_label(host.gpus) or host.cpu


def build_labels(builds: Collection[BuildRow]) -> dict[int, str]:
    """Return labels of builds by id: the commit, or the version if the commit is unknown.

    Builds of one commit may differ in libraries or uncommitted changes, and builds of one version in their engine. The
    labels of these builds end with a hash.
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
