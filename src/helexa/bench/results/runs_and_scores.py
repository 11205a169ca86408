"""Runs (samples) with their requests, and the quality scores of their responses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helexa.bench.results.archive import Archive
from helexa.bench.results.latest_results import latest
from helexa.bench.store.row_types import Reading, RequestRow, RunRow, ScoreRow

MOST_RUNS = 5000
FILTERS = ("target", "host", "model", "scenario", "kind", "sha", "ok", "since_ms", "before_ms")


@dataclass(frozen=True, slots=True)
class RunDetail:
    """A sample (row of table `run`) with all data that is stored about it.

    Attributes:
        metrics: JSON data: `distributions` and `totals` by metric, and additional data.
        requests, telemetry: requests and readings of the sample. Both are empty for imported samples, and after a
            deletion because of their age.
    """

    run: RunRow
    metrics: dict[str, Any]
    requests: list[RequestRow]
    telemetry: list[Reading]
    scores: list[ScoreRow]
    artifact: str | None


def runs(archive: Archive, filters: Mapping[str, Any], *, limit: int = 500, offset: int = 0) -> list[RunRow]:
    """Return the runs (samples) that match the filters, newest first.

    Args:
        archive: the result database.
        filters: values by name in `FILTERS`. `host` is the name of a target or of a host. `sha` is the label
            or the short commit of a build. None matches every value.
        limit: maximum number of samples, reduced to at most `MOST_RUNS`.
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
    """Return one run (sample) with all its data.

    Raises:
        LookupError: no sample has this id.
    """
    reader = archive.reader
    run_row = reader.run(run_id)
    if run_row is None:
        raise LookupError(f"there is no run {run_id}; /api/v1/runs lists all runs")
    return RunDetail(
        run_row,
        reader.metrics(run_id),
        reader.requests(run_id),
        reader.telemetry(run_id),
        reader.scores(run_id),
        reader.artifact(run_id),
    )


_MOST_ARTIFACTS = 500
_LONGEST_ARTIFACT = 16_384


@dataclass(frozen=True, slots=True)
class Check:
    """Medians of score and decode rate of an automatic check, for the newest build."""

    target: str
    model: str
    scenario: str
    build: str
    score: float
    decode_tps: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """A run (sample) of a capability probe, with the stored response and its score.

    `score` is the newest score that a scorer has set. Without such a score, it is the score of the automatic checks.
    """

    run_id: int
    at_ms: int
    target: str
    model: str
    scenario: str
    build: str
    artifact: str
    score: float | None
    scorer: str
    decode_tps: float | None
    total_s: float | None
    completion_tokens: float | None


def checks(archive: Archive, *, target: str | None = None, model: str | None = None) -> list[Check]:
    """Return the score of each automatic check, for the newest build.

    Capability probes are not included.
    """
    return [
        Check(
            result.target,
            result.model,
            result.scenario,
            result.build,
            score.p50,
            result.median("output_tps_user"),
            score.n,
        )
        for result in latest(archive, target=target, model=model)
        if result.kind != "capability" and (score := result.distribution("score")) is not None
    ]


def artifacts(
    archive: Archive, *, target: str | None = None, model: str | None = None, limit: int = _MOST_ARTIFACTS
) -> list[Artifact]:
    """Return the runs of capability probes with their responses, newest first.

    Texts are truncated to 16,384 characters.
    """
    rows = archive.reader.select(
        "SELECT run.id, run.started_ms, target.name AS target, model.name AS model, scenario.name AS scenario,"
        " run.build_id, substr(run.artifact, 1, ?) AS artifact, run.score, run.output_tps_user, run.e2e_s,"
        " run.completion_tokens, said.score AS said, said.scorer AS scorer FROM run"
        " JOIN scenario ON scenario.id = run.scenario_id AND scenario.kind = 'capability'"
        " JOIN target ON target.id = run.target_id JOIN model ON model.id = run.model_id"
        " LEFT JOIN score AS said ON said.run_id = run.id AND said.at_ms ="
        " (SELECT max(at_ms) FROM score WHERE score.run_id = run.id)"
        " WHERE run.artifact IS NOT NULL AND (? IS NULL OR target.name = ?) AND (? IS NULL OR model.name = ?)"
        " GROUP BY run.id ORDER BY run.started_ms DESC LIMIT ?",
        (_LONGEST_ARTIFACT, target, target, model, model, limit),
    )
    return [
        Artifact(
            run_id=row["id"],
            at_ms=row["started_ms"],
            target=row["target"],
            model=row["model"],
            scenario=row["scenario"],
            build=archive.tables.labels[row["build_id"]],
            artifact=row["artifact"],
            score=row["score"] if row["said"] is None else row["said"],
            scorer="" if row["score"] is None and row["said"] is None else row["scorer"] or "checks",
            decode_tps=row["output_tps_user"],
            total_s=row["e2e_s"],
            completion_tokens=row["completion_tokens"],
        )
        for row in rows
    ]
