"""Response quality of models: scores of automatic checks, and responses to probes with their scores."""

from dataclasses import dataclass

from helexa.bench.results.archive import Archive
from helexa.bench.results.latest import latest

_MOST_ARTIFACTS = 500
_LONGEST_ARTIFACT = 16_384


@dataclass(frozen=True, slots=True)
class Check:
    """The result of an automatic check of the newest build: share of correct responses, and decode rate."""

    target: str
    model: str
    scenario: str
    build: str
    score: float
    decode_tps: float | None
    samples: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """A response to a capability probe, and its score.

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
    """Return the results of automatic checks for the newest build of each target, model and scenario.

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
    """Return responses to capability probes, newest first. Texts are truncated to 16,384 characters."""
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
