"""Computes the template variables of each page."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from helexa.bench import alerts, verdicts_and_change_points
from helexa.bench.metric_definitions import METRICS
from helexa.bench.pages import charts, formatting
from helexa.bench.results import capacity_and_scaling, comparison, runs_and_scores, series
from helexa.bench.results.archive import Archive, hardware_label
from helexa.bench.results.summary_and_dimensions import SummaryRow, headline_of, summary, swaps
from helexa.bench.store.row_types import TargetRow

Context = dict[str, Any]
Query = Mapping[str, Any]

RUNS_A_PAGE = 100
_MOST_REQUESTS = 200
_MOST_ROWS = 120
_MOST_BUILDS = 60


def overview(archive: Archive, query: Query) -> Context:
    """Return the variables of the overview page: targets and their newest results."""
    rows = summary(archive)
    raised = alerts.alerts(archive, state="confirmed")
    by_target: dict[str, list[SummaryRow]] = {}
    for row in rows:
        by_target.setdefault(row.target_name, []).append(row)
    hosts = archive.tables.hosts
    labels = Counter(row.label for row in archive.tables.targets.values())
    targets = [
        {
            "name": name,
            "title": _title(target, labels),
            "host": hosts[newest.host_id],
            "hardware": hardware_label(hosts[newest.host_id]),
            "newest": newest,
            "models": list(dict.fromkeys(one.model_id for one in rows)),
            "scenarios": list(dict.fromkeys(one.scenario_id for one in rows)),
            "cells": {(one.model_id, one.scenario_id): one for one in rows},
            "failures": sum(one.failures for one in rows),
            "samples": sum(one.samples for one in rows),
            "judged": any(one.verdict.interval for one in rows),
            "alerts": sum(one.target == name and one.verdict == "regressed" for one in raised),
        }
        for name, rows in by_target.items()
        for newest in [max(rows, key=lambda one: one.last_ms)]
        for target in [next(row for row in archive.tables.targets.values() if row.name == name)]
    ]
    shown = [one for one in targets if query["target"] in (None, one["name"])] or targets
    return {"targets": targets, "shown": shown, "runs": archive.answer("count", archive.reader.run_count)}


def _title(target: TargetRow, labels: Mapping[str, int]) -> str:
    """Return the label of a target, or the target's name if it has no label.

    If another target has the same label, the name is appended to the label.
    """
    if not target.label:
        return target.name
    return target.label if labels[target.label] == 1 else f"{target.label} ({target.name})"


def trends(archive: Archive, query: Query) -> Context:
    """Return the variables of the trends page: one metric over all builds."""
    configuration = _first_configuration(archive, query, ("target", "model", "scenario"))
    if configuration is None:
        return {"series": None, "chosen": query, "chart": None, "baseline": None}
    kind = next(row.kind for row in archive.tables.scenarios.values() if row.name == configuration["scenario"])
    metric = query["metric"] or headline_of(kind)
    trend = series.series(archive, configuration["target"], configuration["model"], configuration["scenario"], metric)
    baseline = next((point for point in trend.points if point.sha == query["baseline"]), None)
    return {
        "series": trend,
        "chosen": configuration | {"metric": metric, "x": query["x"], "baseline": baseline and baseline.sha},
        "baseline": baseline,
        "chart": charts.trend(trend, query["x"], baseline and baseline.p50) if trend.points else None,
        "rows": trend.points[::-1][:_MOST_ROWS],
        "before": {after.build_id: one.sha for one, after in zip(trend.points, trend.points[1:], strict=False)},
    }


def run_list(archive: Archive, query: Query) -> Context:
    """Return the variables of the runs page: samples that match the filters.

    The page has up to 100 samples, newest first.
    """
    offset = query["offset"]
    listed = runs_and_scores.runs(archive, query, limit=RUNS_A_PAGE + 1, offset=offset)
    return {
        "runs": listed[:RUNS_A_PAGE],
        "earlier": offset + RUNS_A_PAGE if len(listed) > RUNS_A_PAGE else None,
        "later": max(0, offset - RUNS_A_PAGE) if offset else None,
        "chosen": query,
    }


def run(archive: Archive, query: Query) -> Context:
    """Return the variables of the page of one sample, with metrics and requests."""
    detail = runs_and_scores.run(archive, query["id"])
    return {
        "detail": detail,
        "run": detail.run,
        "timeline": charts.timeline(detail.requests),
        "telemetry": charts.telemetry(detail),
        "requests": detail.requests[:_MOST_REQUESTS],
        "left_out": max(0, len(detail.requests) - _MOST_REQUESTS),
    }


def compare(archive: Archive, query: Query) -> Context:
    """Return the variables of the comparison page: two builds or targets.

    If the query names neither `a` nor `b`, the two newest builds are compared. If it names only one, nothing is
    compared.
    """
    a, b = query["a"], query["b"]
    if not a and not b:
        a, b = _newest_sides(archive)
    compared: list[comparison.MetricComparison] = []
    wrong = None
    metric = query["metric"] or "output_tps_user"
    if a and b:
        try:
            sides = comparison.Side.parse(a), comparison.Side.parse(b)
            compared = comparison.compare(archive, *sides, model=query["model"], metrics=(metric,))
        except LookupError as error:
            wrong = error.args[0]
    scale = charts.forest_scale([one.ratio for one in compared if one.ratio])
    sides_offered = archive.answer("sides", lambda: _sides(archive))
    return {
        "sides": sides_offered,
        "known": {value for group in sides_offered for value, _ in group["options"]},
        "chosen": dict(query) | {"a": a, "b": b, "metric": metric},
        "found": compared[: 2 * _MOST_ROWS],
        "left_out": max(0, len(compared) - 2 * _MOST_ROWS),
        "differs": list(dict.fromkeys(text for one in compared for text in one.differs)),
        "counts": {state: sum(one.state == state for one in compared) for state in _STATES},
        "scale": scale,
        "wrong": wrong,
    }


def _sides(archive: Archive) -> list[dict[str, Any]]:
    """Return the sides that the comparison page offers: newest builds, then targets.

    Each group has a `title` and `options`, which are pairs of a side as text and its description.
    """
    tables = archive.tables
    rows = archive.reader.select(
        "SELECT target_id, build_id, max(started_ms) AS last FROM run WHERE ok GROUP BY target_id, build_id"
        " ORDER BY last DESC"
    )
    builds: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        target, label = tables.targets[row["target_id"]].name, tables.labels[row["build_id"]]
        text = f"{label} · {tables.builds[row['build_id']].version} · {formatting.day(row['last'])}"
        builds.setdefault(target, []).append((f"{label}@{target}", text))
    groups: list[dict[str, Any]] = [
        {"title": f"Builds on {target}", "options": options[:_MOST_BUILDS]}
        for target, options in sorted(builds.items())
    ]
    if len(builds) > 1:
        newest = [(f"@{target}", f"newest build of each model on {target}") for target in sorted(builds)]
        groups.append({"title": "Targets", "options": newest})
    return groups


def _newest_sides(archive: Archive) -> tuple[str | None, str | None]:
    """Return the two newest builds of the target that was measured last, older first.

    Only builds with samples of the most recently measured model and scenario are considered. With fewer than two
    builds, return None for both.
    """
    configurations = archive.answer("latest", archive.reader.latest_configurations)
    if not configurations:
        return None, None
    newest = max(configurations, key=lambda configuration: configuration.last_ms)
    tables = archive.tables
    target = tables.targets[newest.target_id].name
    rows = archive.reader.select(
        "SELECT build_id, max(started_ms) AS last FROM run WHERE target_id = ? AND model_id = ? AND scenario_id = ?"
        " GROUP BY build_id ORDER BY last DESC LIMIT 2",
        (newest.target_id, newest.model_id, newest.scenario_id),
    )
    sides = [f"{tables.labels[row['build_id']]}@{target}" for row in rows]
    return (sides[1], sides[0]) if len(sides) == 2 else (None, None)


def loads(archive: Archive, query: Query) -> Context:
    """Return the variables of the capacity page: results at each load."""
    configuration = _first_configuration(archive, query, ("target", "model"), capacity_and_scaling.LOAD_KINDS)
    capacities = capacity_and_scaling.capacity(archive, **configuration) if configuration else []
    latency, work = (("ttft_p95_s", "ttft_s"), ("ttft_s", "ttft_s")), (("output_tps", "output_tps"),)
    return {
        "chosen": configuration or dict(query),
        "found": [
            {"capacity": one, "latency": charts.loads(one, latency), "work": charts.loads(one, work)}
            for one in capacities
        ],
        "pareto": charts.pareto(capacities) if capacities else None,
    }


def context(archive: Archive, query: Query) -> Context:
    """Return the variables of the context page: rates by context length."""
    configuration = _first_configuration(archive, query, ("target", "model"), capacity_and_scaling.CONTEXT_KINDS)
    scalings = capacity_and_scaling.scaling(archive, **configuration) if configuration else []
    return {
        "chosen": configuration or dict(query),
        "found": scalings,
        "charts": [charts.ladders(scalings, column) for column in ("prefill_tps", "decode_tps")] if scalings else [],
    }


def swap(archive: Archive, query: Query) -> Context:
    """Return the variables of the loading page: times to unload and load models."""
    swap_rows = swaps(archive, target=query["target"], model=query["model"])
    return {
        "chosen": query,
        "found": swap_rows,
        "longest": max((one.load_ms_median or 0 for one in swap_rows), default=0),
    }


def worth(archive: Archive, query: Query) -> Context:
    """Return the variables of the quality page: scores and responses."""
    where = {"target": query["target"], "model": query["model"]}
    return {
        "chosen": query,
        "checks": runs_and_scores.checks(archive, **where),
        "artifacts": runs_and_scores.artifacts(archive, **where, limit=20),
    }


def alert_list(archive: Archive, query: Query) -> Context:
    """Return the variables of the alerts page: matching alerts, newest first."""
    alert_rows = alerts.alerts(archive, target=query["target"], model=query["model"], state=query["state"], limit=200)
    return {"chosen": query, "alerts": alert_rows}


def method(_archive: Archive, _query: Query) -> Context:
    """Return the variables of the method page: metrics, and comparison rules."""
    return {
        "metrics": METRICS.values(),
        "rule": verdicts_and_change_points,
        "knee_factor": capacity_and_scaling.KNEE_FACTOR,
    }


def _first_configuration(
    archive: Archive, query: Query, parts: tuple[str, ...], kinds: tuple[str, ...] = ()
) -> dict[str, Any] | None:
    """Select the benchmark configuration that a page shows.

    The function selects the first measured configuration that matches the query in all `parts`. If no configuration
    matches, the function ignores the last of `parts`, then the last two, and so on until a configuration matches.

    Args:
        archive: the result database.
        query: query parameters. None matches every value.
        parts: keys of the result, among `target`, `model` and `scenario`.
        kinds: kinds of scenarios to consider. If empty, all kinds are considered.

    Returns:
        The value of each of `parts`, or None if nothing has been measured.
    """
    configurations = [
        {"target": row.target_name, "model": row.model_id, "scenario": row.scenario_id}
        for row in summary(archive)
        if not kinds or row.kind in kinds
    ]
    for depth in range(len(parts), -1, -1):
        for configuration in configurations:
            if all(query[part] in (None, configuration[part]) for part in parts[:depth]):
                return {part: configuration[part] for part in parts}
    return None


_STATES = ("regressed", "improved", "same", "too few")
