"""Display names of targets, hosts, builds, models and scenarios, which results refer to by row id."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from helexa.bench.identity import digest
from helexa.bench.store.reader import Reader
from helexa.bench.store.rows import BuildRow, HostRow, ModelRow, ScenarioRow, TargetRow


@dataclass(frozen=True, slots=True)
class DimensionTables:
    """All targets, hosts, builds, models and scenarios of the database by row id.

    Attributes:
        labels: unique display name of each build by row id.
    """

    targets: dict[int, TargetRow]
    hosts: dict[int, HostRow]
    builds: dict[int, BuildRow]
    models: dict[int, ModelRow]
    scenarios: dict[int, ScenarioRow]
    labels: dict[int, str]

    @classmethod
    def read(cls, reader: Reader) -> "DimensionTables":
        """Read all rows from the database."""
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
    """Return a short text that names the accelerators of a host, for example `2× RTX 5090 + H100`. Empty if none."""
    counts = Counter(str(gpu["name"]).removeprefix("NVIDIA GeForce ").removeprefix("NVIDIA ") for gpu in gpus)
    return " + ".join(name if count == 1 else f"{count}× {name}" for name, count in counts.items())


def hardware_label(host: HostRow) -> str:
    """Return a short text that names the accelerators of a host, or its CPU if it has no accelerators."""
    return gpu_label(host.gpus) or host.cpu


def build_labels(builds: Collection[BuildRow]) -> dict[int, str]:
    """Return a unique display name for each build by row id: its commit, or its version if the commit is unknown.

    Several builds may have the same commit or version, but different libraries, uncommitted changes or engines. To make
    their names unique, a short hash is appended.
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
