"""The queries of the API, and the thread that runs the queries."""

import asyncio
import difflib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from helexa.bench import alerts
from helexa.bench.metric_definitions import METRICS, Metric
from helexa.bench.results import capacity_and_scaling, comparison, runs_and_scores, series
from helexa.bench.results.archive import Archive
from helexa.bench.results.summary_and_dimensions import SummaryRow, Swap, dimensions, headline_of, summary, swaps
from helexa.bench.store.database import StoreError
from helexa.bench.store.row_types import RequestRow, RunRow
from helexa.core.errors import ApiError

_LONGEST = 300
_MOST_WAITING = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parameter:
    """Definition of one URL query parameter."""

    about: str  # description for users
    kind: Literal["text", "integer", "boolean"] = "text"  # type of the value
    default: Any = None  # value if the parameter is missing or empty
    least: int = 0  # smallest allowed integer
    most: int = 2**53  # largest allowed integer
    choices: tuple[str, ...] = ()  # allowed texts. If empty, every text is allowed.
    required: bool = False  # True if a request without the parameter is rejected

    def read(self, name: str, text: str | None) -> Any:
        """Parse the text of the parameter `name` and return its value.

        Args:
            name: name of the parameter, for error messages.
            text: text from the URL, or None if the parameter is missing. An empty text counts as missing.

        Raises:
            ApiError: status 400, if `text` is invalid, or is missing although the parameter is required.
        """
        if not text:
            if self.required:
                raise _wrong(name, f"the parameter '{name}' is required; add the parameter to the URL")
            return self.default
        if len(text) > _LONGEST or "\0" in text:
            raise _wrong(name, f"'{name}' has {len(text)} characters; send at most {_LONGEST}, and no NUL")
        if self.choices and text not in self.choices:
            raise _wrong(name, f"'{name}' must be one of {', '.join(self.choices)}; the request has {text[:80]!r}")
        if self.kind == "boolean":
            if text.lower() not in _BOOLEANS:
                raise _wrong(name, f"'{name}' must be true or false; the request has {text[:80]!r}")
            return _BOOLEANS[text.lower()]
        if self.kind == "integer":
            if not (text.isascii() and text.isdigit() and self.least <= int(text) <= self.most):
                raise _wrong(
                    name, f"'{name}' must be an integer from {self.least} to {self.most}; the request has {text[:80]!r}"
                )
            return int(text)
        return text

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the value, for the OpenAPI document."""
        if self.kind == "integer":
            schema: dict[str, Any] = {"type": "integer", "minimum": self.least, "maximum": self.most}
        elif self.kind == "boolean":
            schema = {"type": "boolean"}
        else:
            schema = {"type": "string", "maxLength": _LONGEST}
            if self.choices:
                schema = {"type": "string", "enum": list(self.choices)}
        return schema if self.default is None else schema | {"default": self.default}


Parameters = Mapping[str, Parameter]
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def read_query(arguments: Mapping[str, str], parameters: Parameters) -> dict[str, Any]:
    """Return the values of all `parameters`, including default values.

    Raises:
        ApiError: status 400, if an argument is unknown or invalid, or a required parameter is missing.
    """
    for name in arguments:
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(parameters) or 'none'}"
            raise ApiError(400, "unknown_parameter", f"unknown parameter '{name[:80]}'; {hint}")
    return {name: parameter.read(name, arguments.get(name)) for name, parameter in parameters.items()}


def _wrong(name: str, problem: str) -> ApiError:
    return ApiError(400, "invalid_parameter", problem, param=name)


_TARGET = Parameter("Name of a target")
_MODEL = Parameter("Name of a model")
_SCENARIO = Parameter("Name of a scenario")
_WHERE = {"host": _TARGET, "model": _MODEL}
METRIC = Parameter("Name of a metric. Default: the main metric of the scenario", choices=series.HOT)
STATE = Parameter("Only alerts in this state", choices=("suspected", "confirmed", "dismissed"))
RUN_FILTERS: Parameters = {
    "host": Parameter("Name of a target or of a host"),
    "model": _MODEL,
    "scenario": _SCENARIO,
    "kind": Parameter("Kind of scenario, for example `single`"),
    "sha": Parameter("Label of a build, for example its short commit"),
    "ok": Parameter("true: only valid samples. false: only invalid samples", "boolean"),
    "since_ms": Parameter("Earliest start of a sample, in UTC epoch milliseconds", "integer"),
    "before_ms": Parameter("Only samples that started before this time, in UTC epoch milliseconds", "integer"),
}


@dataclass(frozen=True)
class ApiQuery:
    """A query of the API, available at `/api/<path>` and `/api/v1/<path>`."""

    path: str  # last part of the URL path
    summary: str  # description for users
    shape: Any  # type of the response
    # Function that returns the response from the database and the parameter values. It raises LookupError if a named
    # item does not exist.
    answer: Callable[[Archive, Mapping[str, Any]], Any]
    parameters: Parameters = field(default_factory=dict[str, Parameter])
    table: bool = False  # True if the response is a list of rows, which can also be returned as CSV


@dataclass(frozen=True, slots=True)
class Health:
    """Response of the query `health`, which shows that results can be read.

    `run_count` is the number of samples.
    """

    status: str
    run_count: int


def _where(query: Mapping[str, Any]) -> dict[str, Any]:
    return {"target": query["host"], "model": query["model"]}


def _series(archive: Archive, query: Mapping[str, Any]) -> list[series.Series]:
    tables = archive.tables
    kinds = {row.name: row.kind for row in tables.scenarios.values()}
    if query["scenario"] not in kinds:
        raise LookupError(f"no scenario is called '{query['scenario'][:80]}'; /api/v1/dimensions lists all names")
    metric = query["metric"] or headline_of(kinds[query["scenario"]])
    targets = [query["host"]] if query["host"] else [row.name for row in tables.targets.values()]
    trends = [series.series(archive, target, query["model"], query["scenario"], metric) for target in targets]
    return [trend for trend in trends if trend.points]


def _compare(archive: Archive, query: Mapping[str, Any]) -> list[comparison.MetricComparison]:
    a, b = (comparison.Side.parse(query[side]) for side in ("a", "b"))
    metrics = (query["metric"],) if query["metric"] else comparison.COMPARED
    return comparison.compare(archive, a, b, model=query["model"], metrics=metrics)


_SIDE = "`build`, `@target` or `build@target`, where build is a commit or a version. Example: `3f2a91c@beast`"
QUESTIONS = (
    ApiQuery(
        "health",
        "Check whether the results can be read",
        Health,
        lambda archive, _: Health("ok", archive.reader.run_count()),
    ),
    ApiQuery(
        "dimensions",
        "List the targets, models, scenarios, metrics and builds",
        dict[str, Any],
        lambda archive, _: dimensions(archive),
    ),
    ApiQuery(
        "summary",
        "Newest results of each target, model and scenario",
        list[SummaryRow],
        lambda archive, query: summary(archive, **_where(query)),
        _WHERE,
        table=True,
    ),
    ApiQuery(
        "scaling",
        "Prefill and decode rates by context length",
        list[capacity_and_scaling.Scaling],
        lambda archive, query: capacity_and_scaling.scaling(archive, **_where(query)),
        _WHERE,
    ),
    ApiQuery(
        "concurrency",
        "Latency, throughput and goodput by load, and the load at the knee",
        list[capacity_and_scaling.Capacity],
        lambda archive, query: capacity_and_scaling.capacity(archive, **_where(query)),
        _WHERE,
    ),
    ApiQuery(
        "swap",
        "Times to unload and load models",
        list[Swap],
        lambda archive, query: swaps(archive, **_where(query)),
        _WHERE,
        table=True,
    ),
    ApiQuery(
        "capability",
        "Responses to capability probes, with scores",
        list[runs_and_scores.Artifact],
        lambda archive, query: runs_and_scores.artifacts(archive, **_where(query), limit=query["limit"]),
        {**_WHERE, "limit": Parameter("Maximum number of results, newest first", "integer", 100, 1, 500)},
        table=True,
    ),
    ApiQuery(
        "checks",
        "Scores of automatic checks (tool calls, JSON), with decode rates",
        list[runs_and_scores.Check],
        lambda archive, query: runs_and_scores.checks(archive, **_where(query)),
        _WHERE,
        table=True,
    ),
    ApiQuery(
        "series",
        "History of a metric, one point per build, with change points and verdicts",
        list[series.Series],
        _series,
        {
            "model": Parameter(_MODEL.about, required=True),
            "scenario": Parameter(_SCENARIO.about, required=True),
            "host": _TARGET,
            "metric": METRIC,
        },
    ),
    ApiQuery(
        "runs",
        "Samples (runs), newest first",
        list[RunRow],
        lambda archive, query: runs_and_scores.runs(archive, query, limit=query["limit"], offset=query["offset"]),
        {
            **RUN_FILTERS,
            "limit": Parameter("Maximum number of samples", "integer", 500, 1, runs_and_scores.MOST_RUNS),
            "offset": Parameter("Number of samples to skip", "integer", 0, 0),
        },
        table=True,
    ),
    ApiQuery(
        "run",
        "One sample with all its data",
        runs_and_scores.RunDetail,
        lambda archive, query: runs_and_scores.run(archive, query["id"]),
        {"id": Parameter("Id of the sample", "integer", required=True)},
    ),
    ApiQuery(
        "requests",
        "Requests of a sample",
        list[RequestRow],
        lambda archive, query: runs_and_scores.run(archive, query["run"]).requests,
        {"run": Parameter("Id of the sample", "integer", required=True)},
        table=True,
    ),
    ApiQuery(
        "compare",
        "Compare two builds, targets or engines: ratios of medians with 95 % confidence intervals",
        list[comparison.MetricComparison],
        _compare,
        {
            "a": Parameter(_SIDE, required=True),
            "b": Parameter(_SIDE, required=True),
            "model": _MODEL,
            "metric": Parameter("Name of the only metric to compare", choices=series.HOT),
        },
        table=True,
    ),
    ApiQuery(
        "alerts",
        "Detected performance changes, newest first",
        list[alerts.Alert],
        lambda archive, query: alerts.alerts(archive, **_where(query), state=query["state"], limit=query["limit"]),
        {
            **_WHERE,
            "state": STATE,
            "limit": Parameter("Maximum number of results, newest first", "integer", 500, 1, 5000),
        },
        table=True,
    ),
    ApiQuery(
        "method",
        "Definitions of the metrics",
        list[Metric],
        lambda _archive, _query: list(METRICS.values()),
        table=True,
    ),
)


class QueryExecutor:
    """Runs queries on the result database in a separate thread, one at a time.

    The database is opened at the first query. If another file has replaced the database file, the next query opens the
    new file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "archive")
        self._archive: Archive | None = None
        self._file: tuple[int, int] | None = None
        self._waiting = 0

    async def ask(self, query: Callable[[Archive], T]) -> T:
        """Run `query` on the database in the executor's thread and return its result.

        Raises:
            ApiError: status 503, if the database cannot be opened or too many queries are already waiting.
        """
        if self._waiting >= _MOST_WAITING:
            raise ApiError(
                503,
                "overloaded",
                f"{_MOST_WAITING} requests already wait for the database; try again in 1 s",
                retry_after=1,
            )
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, query)
        except StoreError as error:
            raise ApiError(503, "no_database", str(error), retry_after=10) from None
        finally:
            self._waiting -= 1

    async def warm_up(self) -> None:
        """Fill the cache with the results of the overview page, if there is a database."""
        with suppress(ApiError):
            await self.ask(summary)

    async def close(self) -> None:
        """Cancel waiting queries, block until the running one ends, close the database."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._archive is not None:
            self._archive.close()

    def _run(self, query: Callable[[Archive], T]) -> T:
        return query(self._current())

    def _current(self) -> Archive:
        try:
            status = self._path.stat()
        except OSError:
            raise StoreError(
                f"nothing has been measured yet: {self._path} does not exist; run `helexa-bench once`"
            ) from None
        file = (status.st_dev, status.st_ino)
        if self._archive is None or file != self._file:
            if self._archive is not None:
                self._archive.close()
                self._archive = None
            self._archive, self._file = Archive(self._path), file
        return self._archive
