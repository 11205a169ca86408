"""Reads single samples (table `run`) and their requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helexa.bench.results.archive import Archive
from helexa.bench.store.rows import Reading, RequestRow, RunRow, ScoreRow

MOST_RUNS = 5000
FILTERS = ("target", "host", "model", "scenario", "kind", "sha", "ok", "since_ms", "before_ms")


@dataclass(frozen=True, slots=True)
class RunDetail:
    """A sample (row of table `run`) with all data that is stored about it.

    Attributes:
        metrics: summary statistics and totals by metric.
        requests: the requests of the sample. Empty if the requests were deleted because of their age.
    """

    run: RunRow
    metrics: dict[str, Any]
    requests: list[RequestRow]
    telemetry: list[Reading]
    scores: list[ScoreRow]
    artifact: str | None


def runs(archive: Archive, filters: Mapping[str, Any], *, limit: int = 500, offset: int = 0) -> list[RunRow]:
    """Return the samples that match the filters, newest first.

    Args:
        archive: the result database.
        filters: values by name in `FILTERS`. `host` is the name of a target or of a host. None matches every value.
        limit: maximum number of samples.
        offset: number of samples to skip.
    """
    criteria = {name: filters.get(name) for name in FILTERS}
    if criteria["host"] in {row.name for row in archive.tables.targets.values()}:
        criteria["target"], criteria["host"] = criteria["host"], None
    build_id = next((id for id, label in archive.tables.labels.items() if label == criteria["sha"]), None)
    if build_id is not None:
        criteria |= {"sha": None, "build_id": build_id}
    return archive.reader.runs(limit=min(limit, MOST_RUNS), offset=offset, **criteria)


def run(archive: Archive, run_id: int) -> RunDetail:
    """Return one sample with all its data.

    Raises:
        LookupError: no sample has this id.
    """
    reader = archive.reader
    run_row = reader.run(run_id)
    if run_row is None:
        raise LookupError(f"there is no run {run_id}")
    return RunDetail(
        run_row,
        reader.metrics(run_id),
        reader.requests(run_id),
        reader.telemetry(run_id),
        reader.scores(run_id),
        reader.artifact(run_id),
    )
