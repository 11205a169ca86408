"""Single runs, and the requests they are made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helexa.bench.results.archive import Archive
from helexa.bench.store.rows import Reading, RequestRow, RunRow, ScoreRow

MOST_RUNS = 5000
FILTERS = ("target", "host", "model", "scenario", "kind", "sha", "ok", "since_ms", "before_ms")


@dataclass(frozen=True, slots=True)
class RunDetail:
    """A run with all that is kept of it.

    Attributes:
        metrics: distributions and totals by metric.
        requests: none when they have been pruned.
    """

    run: RunRow
    metrics: dict[str, Any]
    requests: list[RequestRow]
    telemetry: list[Reading]
    scores: list[ScoreRow]
    artifact: str | None


def runs(archive: Archive, filters: Mapping[str, Any], *, limit: int = 500, offset: int = 0) -> list[RunRow]:
    """Runs that pass the filters, newest first; `host` is a target's name or a host's."""
    asked = {name: filters.get(name) for name in FILTERS}
    if asked["host"] in {row.name for row in archive.names.targets.values()}:
        asked["target"], asked["host"] = asked["host"], None
    build_id = next((id for id, label in archive.names.labels.items() if label == asked["sha"]), None)
    if build_id is not None:
        asked |= {"sha": None, "build_id": build_id}
    return archive.reader.runs(limit=min(limit, MOST_RUNS), offset=offset, **asked)


def run(archive: Archive, run_id: int) -> RunDetail:
    """One run.

    Raises:
        LookupError: there is none of that id.
    """
    reader = archive.reader
    found = reader.run(run_id)
    if found is None:
        raise LookupError(f"there is no run {run_id}")
    return RunDetail(
        found,
        reader.metrics(run_id),
        reader.requests(run_id),
        reader.telemetry(run_id),
        reader.scores(run_id),
        reader.artifact(run_id),
    )
