"""Definitions of all API queries: URL path, parameters, response type, and the function that reads the results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from helexa.bench.api.query import Parameter, Parameters
from helexa.bench.measurement.metrics import METRICS, Metric
from helexa.bench.results import (
    alerts,
    capacity,
    comparison,
    dimensions,
    quality,
    runs,
    scaling,
    series,
    summary,
    swaps,
)
from helexa.bench.results.archive import Archive
from helexa.bench.store.rows import RequestRow, RunRow

_TARGET = Parameter("A target's name")
_MODEL = Parameter("A model's name")
_SCENARIO = Parameter("A scenario's name")
_WHERE = {"host": _TARGET, "model": _MODEL}
_METRIC = Parameter("A metric; without one, what the scenario is there for", choices=series.HOT)
RUN_FILTERS: Parameters = {
    "host": Parameter("A target's name, or a host's"),
    "model": _MODEL,
    "scenario": _SCENARIO,
    "kind": Parameter("A kind of scenario"),
    "sha": Parameter("A build's commit, as it is shown"),
    "ok": Parameter("Whether the run succeeded", "boolean"),
    "since_ms": Parameter("Not before this, UTC epoch milliseconds", "integer"),
    "before_ms": Parameter("Before this, UTC epoch milliseconds", "integer"),
}


@dataclass(frozen=True)
class ApiQuery:
    """A query of the API, available at `/api/<path>` and `/api/v1/<path>`.

    Attributes:
        path: last part of the URL path.
        summary: description for users.
        shape: type of the response.
        answer: function that returns the response from the database and the parameter values. It raises LookupError if
            a named item does not exist.
        parameters: query parameters by name.
        table: True if the response is a list of rows, which can also be returned as CSV.
    """

    path: str
    summary: str
    shape: Any
    answer: Callable[[Archive, Mapping[str, Any]], Any]
    parameters: Parameters = field(default_factory=dict[str, Parameter])
    table: bool = False


@dataclass(frozen=True, slots=True)
class Health:
    """Response of the query `health`, which shows that results can be read. `run_count` is the number of samples."""

    status: str
    run_count: int


def _where(query: Mapping[str, Any]) -> dict[str, Any]:
    return {"target": query["host"], "model": query["model"]}


def _series(archive: Archive, query: Mapping[str, Any]) -> list[series.Series]:
    tables = archive.tables
    kinds = {row.name: row.kind for row in tables.scenarios.values()}
    if query["scenario"] not in kinds:
        raise LookupError(f"no scenario is called '{query['scenario']}'")
    metric = query["metric"] or summary.headline_of(kinds[query["scenario"]])
    targets = [query["host"]] if query["host"] else [row.name for row in tables.targets.values()]
    trends = [series.series(archive, target, query["model"], query["scenario"], metric) for target in targets]
    return [trend for trend in trends if trend.points]


def _compare(archive: Archive, query: Mapping[str, Any]) -> list[comparison.MetricComparison]:
    a, b = (comparison.Side.parse(query[side]) for side in ("a", "b"))
    metrics = (query["metric"],) if query["metric"] else comparison.COMPARED
    return comparison.compare(archive, a, b, model=query["model"], metrics=metrics)


_SIDE = "A build's commit or version, `@` and a target's name, or both"

QUESTIONS = (
    ApiQuery(
        "health", "Whether results can be read", Health, lambda archive, _: Health("ok", archive.reader.run_count())
    ),
    ApiQuery("dimensions", "What can be asked for", dict[str, Any], lambda archive, _: dimensions.dimensions(archive)),
    ApiQuery(
        "summary",
        "The newest build of each target, model and scenario",
        list[summary.SummaryRow],
        lambda archive, query: summary.summary(archive, **_where(query)),
        _WHERE,
        table=True,
    ),
    ApiQuery(
        "scaling",
        "Rates over the length of the context",
        list[scaling.Scaling],
        lambda archive, query: scaling.scaling(archive, **_where(query)),
        _WHERE,
    ),
    ApiQuery(
        "concurrency",
        "Latency, throughput and goodput over load, with the knee",
        list[capacity.Capacity],
        lambda archive, query: capacity.capacity(archive, **_where(query)),
        _WHERE,
    ),
    ApiQuery(
        "swap",
        "What it costs to load a model",
        list[swaps.Swap],
        lambda archive, query: swaps.swaps(archive, **_where(query)),
        _WHERE,
        table=True,
    ),
    ApiQuery(
        "capability",
        "What probes produced, with scores",
        list[quality.Artifact],
        lambda archive, query: quality.artifacts(archive, **_where(query), limit=query["limit"]),
        {**_WHERE, "limit": Parameter("The newest this many", "integer", 100, 1, 500)},
        table=True,
    ),
    ApiQuery(
        "checks",
        "Scores of calls, JSON and other checks beside speed",
        list[quality.Check],
        lambda archive, query: quality.checks(archive, **_where(query)),
        _WHERE,
        table=True,
    ),
    ApiQuery(
        "series",
        "A metric build by build, with change points and verdicts",
        list[series.Series],
        _series,
        {
            "model": Parameter(_MODEL.about, required=True),
            "scenario": Parameter(_SCENARIO.about, required=True),
            "host": _TARGET,
            "metric": _METRIC,
        },
    ),
    ApiQuery(
        "runs",
        "Runs, newest first",
        list[RunRow],
        lambda archive, query: runs.runs(archive, query, limit=query["limit"], offset=query["offset"]),
        {
            **RUN_FILTERS,
            "limit": Parameter("At most this many", "integer", 500, 1, runs.MOST_RUNS),
            "offset": Parameter("After this many", "integer", 0, 0),
        },
        table=True,
    ),
    ApiQuery(
        "run",
        "One run with all that is kept of it",
        runs.RunDetail,
        lambda archive, query: runs.run(archive, query["id"]),
        {"id": Parameter("The run's id", "integer", required=True)},
    ),
    ApiQuery(
        "requests",
        "The requests of a run",
        list[RequestRow],
        lambda archive, query: runs.run(archive, query["run"]).requests,
        {"run": Parameter("The run's id", "integer", required=True)},
        table=True,
    ),
    ApiQuery(
        "compare",
        "Two builds, targets or engines: ratios of medians with 95 % intervals",
        list[comparison.MetricComparison],
        _compare,
        {
            "a": Parameter(_SIDE, required=True),
            "b": Parameter(_SIDE, required=True),
            "model": _MODEL,
            "metric": Parameter("One metric only", choices=series.HOT),
        },
        table=True,
    ),
    ApiQuery(
        "alerts",
        "Changes that were noticed, newest first",
        list[alerts.Alert],
        lambda archive, query: alerts.alerts(archive, **_where(query), state=query["state"], limit=query["limit"]),
        {
            **_WHERE,
            "state": Parameter("Only these", choices=("suspected", "confirmed", "dismissed")),
            "limit": Parameter("The newest this many", "integer", 500, 1, 5000),
        },
        table=True,
    ),
    ApiQuery(
        "method", "What each metric means", list[Metric], lambda _archive, _query: list(METRICS.values()), table=True
    ),
)
