"""Reads alerts of performance changes from the database, with names instead of row ids."""

from dataclasses import dataclass

from helexa.bench.measurement.metrics import METRICS
from helexa.bench.results.archive import Archive


@dataclass(frozen=True, slots=True)
class Alert:
    """A change of one metric between a build and earlier builds, on one target, model and scenario.

    Attributes:
        state: `suspected` until more samples have been taken, then `confirmed` or `dismissed`.
        baseline: labels of the earlier builds.
    """

    id: int
    target: str
    model: str
    scenario: str
    build: str
    metric: str
    better: str
    state: str
    verdict: str
    ratio: float
    ratio_low: float
    ratio_high: float
    threshold: float
    samples: int
    baseline_samples: int
    baseline: list[str]
    raised_ms: int
    updated_ms: int
    delivered_ms: int | None


def alerts(
    archive: Archive, *, target: str | None = None, model: str | None = None, state: str | None = None, limit: int = 500
) -> list[Alert]:
    """Return alerts, newest first, with the given target, model and state. None matches every value.

    Only the newest `limit` alerts are read and then filtered, so fewer may be returned.
    """
    tables = archive.tables
    alert_rows = [
        Alert(
            id=row.id,
            target=tables.targets[row.target_id].name,
            model=tables.models[row.model_id].name,
            scenario=tables.scenarios[row.scenario_id].name,
            build=tables.labels[row.build_id],
            metric=row.metric,
            better=METRICS[row.metric].better,
            state=row.state,
            verdict=row.verdict,
            ratio=row.ratio,
            ratio_low=row.ratio_low,
            ratio_high=row.ratio_high,
            threshold=row.threshold,
            samples=row.samples,
            baseline_samples=row.baseline_samples,
            baseline=[tables.labels[id] for id in row.baseline_builds if id in tables.labels],
            raised_ms=row.raised_ms,
            updated_ms=row.updated_ms,
            delivered_ms=row.delivered_ms,
        )
        for row in archive.reader.alerts(limit)
    ]
    return [
        one
        for one in alert_rows
        if target in (None, one.target) and model in (None, one.model) and state in (None, one.state)
    ]
