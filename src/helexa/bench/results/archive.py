"""The result database, opened for reading, with a cache of query results."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from helexa.bench.host_build_and_model import digest
from helexa.bench.store.database import Reader
from helexa.bench.store.row_types import BuildRow, HostRow, ModelRow, ScenarioRow, TargetRow


@dataclass(frozen=True, slots=True)
class DimensionTables:
    """All targets, hosts, builds, models and scenarios of the database by row id."""

    targets: dict[int, TargetRow]
    hosts: dict[int, HostRow]
    builds: dict[int, BuildRow]
    models: dict[int, ModelRow]
    scenarios: dict[int, ScenarioRow]
    labels: dict[int, str]  # unique display name of each build by row id

    @classmethod
    def read(cls, reader: Reader) -> "DimensionTables":
        """Return all targets, hosts, builds, models and scenarios of the database."""
        builds = {row.id: row for row in reader.builds()}
        return cls(
            {row.id: row for row in reader.targets()},
            {row.id: row for row in reader.hosts()},
            builds,
            {row.id: row for row in reader.models()},
            {row.id: row for row in reader.scenarios()},
            _build_labels(builds.values()),
        )


def gpu_label(gpus: list[dict[str, Any]]) -> str:
    """Return the accelerators of a host as text, for example `2× RTX 5090 + H100`."""
    counts = Counter(str(gpu["name"]).removeprefix("NVIDIA GeForce ").removeprefix("NVIDIA ") for gpu in gpus)
    return " + ".join(name if count == 1 else f"{count}× {name}" for name, count in counts.items())


def hardware_label(host: HostRow) -> str:
    """Return the accelerators of a host as text, or its CPU if it has none."""
    return gpu_label(host.gpus) or host.cpu


def _build_labels(builds: Collection[BuildRow]) -> dict[int, str]:
    """Return a unique display name by row id of each build: its commit or version.

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


_MOST_ANSWERS = 256
_MOST_PERMANENT = 8192

T = TypeVar("T")


class Archive:
    """The result database, opened for reading, with caches of query results.

    Only one thread at a time may use an archive.
    """

    def __init__(self, path: Path) -> None:
        self.reader = Reader(path)  # the database without caches
        self._version = -1
        self._answers: OrderedDict[Hashable, object] = OrderedDict()
        self._permanent: OrderedDict[Hashable, object] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database."""
        self.reader.close()

    @property
    def tables(self) -> DimensionTables:
        """Rows of all targets, hosts, builds, models and scenarios by row id."""
        return self.answer("tables", lambda: DimensionTables.read(self.reader))

    def answer(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return the result cached under `key`, or else call `find` and cache its result.

        The cached result is used until another connection writes to the database. Callers must not change the result.
        """
        version = self.reader.select("PRAGMA data_version")[0][0]
        if version != self._version:
            self._version = version
            self._answers.clear()
        return _remembered(self._answers, _MOST_ANSWERS, key, find)

    def keep(self, key: Hashable, find: Callable[[], T]) -> T:
        """Like `answer`, return a cached or new result, but cache it without expiry.

        The cached result is also used after another connection has written to the database. If the cache is full, the
        least recently used result is removed.
        """
        return _remembered(self._permanent, _MOST_PERMANENT, key, find)


def _remembered(memory: OrderedDict[Hashable, object], most: int, key: Hashable, find: Callable[[], T]) -> T:
    if key in memory:
        memory.move_to_end(key)
        return memory[key]  # type: ignore[return-value]
    result = find()
    memory[key] = result
    if len(memory) > most:
        memory.popitem(last=False)
    return result
