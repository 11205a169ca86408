"""What ids stand for."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from helexa.bench.store.reader import Reader
from helexa.bench.store.rows import BuildRow, HostRow, ModelRow, ScenarioRow, TargetRow


@dataclass(frozen=True, slots=True)
class Names:
    """All of a database's targets, hosts, builds, models and scenarios by their ids."""

    targets: dict[int, TargetRow]
    hosts: dict[int, HostRow]
    builds: dict[int, BuildRow]
    models: dict[int, ModelRow]
    scenarios: dict[int, ScenarioRow]

    @classmethod
    def of(cls, reader: Reader) -> "Names":
        """Read them."""
        return cls(
            {row.id: row for row in reader.targets()},
            {row.id: row for row in reader.hosts()},
            {row.id: row for row in reader.builds()},
            {row.id: row for row in reader.models()},
            {row.id: row for row in reader.scenarios()},
        )


def gpu_label(gpus: list[dict[str, Any]]) -> str:
    """A host's cards in short: `2× RTX 5090 + H100`; empty without any."""
    counts = Counter(str(gpu["name"]).removeprefix("NVIDIA GeForce ").removeprefix("NVIDIA ") for gpu in gpus)
    return " + ".join(name if count == 1 else f"{count}× {name}" for name, count in counts.items())


def hardware_label(host: HostRow) -> str:
    """What a host computes with: its cards, else its processor."""
    return gpu_label(host.gpus) or host.cpu


def build_label(build: BuildRow) -> str:
    """A build in short: its commit, or its version where no commit is known."""
    name = build.sha if build.sha != "external" else build.version or "external"
    return f"{name}+" if build.dirty else name
