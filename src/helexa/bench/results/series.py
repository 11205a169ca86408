"""The history of one metric over all builds of a target, model and scenario."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from helexa.bench.metric_definitions import METRICS
from helexa.bench.results.archive import Archive
from helexa.bench.results.comparison import changes, hardware
from helexa.bench.store.row_types import ConfigurationRow
from helexa.bench.verdicts_and_change_points import MIN_EFFECT, Verdict, judge, levels

HOT = (
    *("ttft_s", "ttfo_s", "tpot_s", "icl_s", "e2e_s", "output_tps_user", "output_tps", "prefill_tps", "queue_s"),
    *("goodput_rps", "goodput_share", "load_s", "unload_s", "release_s", "score"),
)
"""The metrics that are columns of the table `run`."""
MOST_BUILDS = 500


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a series: a build's samples, compared with earlier builds.

    Attributes:
        build_id: row id of the build. `sha` is its display name.
        at_ms: time of the first sample in UTC epoch milliseconds.
        host_id, model_id, scenario_id: row ids of hardware, model configuration and scenario parameters. If an id
            differs from the id of the previous point, the respective properties have changed.
        values: the samples, oldest first.
        p10, p50, p90: percentiles of the samples.
        level: value of the piecewise constant fit at this build.
        change: relative change of `level` since the previous build. None if the level is the same, or if hardware,
            configuration or parameters changed.
        verdict: comparison with earlier builds on the same hardware with the same configuration and parameters.
    """

    build_id: int
    sha: str
    version: str
    built_ms: int | None
    at_ms: int
    host_id: int
    model_id: int
    scenario_id: int
    values: list[float]
    p10: float
    p50: float
    p90: float
    level: float | None
    change: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Mark:
    """A change of hardware, model configuration or parameters within a series."""

    at_ms: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Series:
    """The history of one metric: one point per build and configuration, oldest first."""

    target: str
    model: str
    scenario: str
    metric: str
    unit: str
    better: str
    points: list[Point] = field(default_factory=list[Point])
    marks: list[Mark] = field(default_factory=list[Mark])
    estimated: bool = False


def series(archive: Archive, target: str, model: str, scenario: str, metric: str) -> Series:
    """Return the history of a metric over the newest 500 builds.

    Raises:
        KeyError: the metric is not a column of the table `run`.
    """
    if metric not in HOT:
        raise KeyError(metric)
    rows = archive.reader.select(
        "SELECT run.build_id, run.host_id, run.model_id, run.scenario_id, run.started_ms, run.estimated,"
        f" run.{metric} AS value FROM run"
        " WHERE run.target_id = (SELECT id FROM target WHERE name = ?)"
        " AND run.model_id IN (SELECT id FROM model WHERE name = ?)"
        " AND run.scenario_id IN (SELECT id FROM scenario WHERE name = ?)"
        f" AND run.ok AND run.{metric} IS NOT NULL ORDER BY run.started_ms, run.id",
        (target, model, scenario),
    )
    grouped = _samples_by_build([dict(row) for row in rows])[-MOST_BUILDS:]
    about = METRICS[metric]
    target_id = next((row.id for row in archive.tables.targets.values() if row.name == target), 0)
    scenario_ids = frozenset(row.id for row in archive.tables.scenarios.values() if row.name == scenario)
    points = _points(
        archive, grouped, metric, lambda history: known_level(archive, target_id, scenario_ids, metric, history)
    )
    return Series(
        target,
        model,
        scenario,
        metric,
        about.unit,
        about.better,
        points,
        _marks(archive, points),
        any(row["estimated"] for row in rows),
    )


@dataclass(slots=True)
class BuildSamples:
    """In a series: the samples of one metric and build, oldest first.

    Attributes:
        at_ms: start of the first sample in UTC epoch milliseconds.
    """

    build_id: int
    host_id: int
    model_id: int
    scenario_id: int
    at_ms: int
    values: list[float] = field(default_factory=list[float])


def _samples_by_build(rows: Sequence[Mapping[str, Any]]) -> list[BuildSamples]:
    """Group database rows by build, host, model and scenario.

    Return the groups, sorted by the time of the first sample in the group.
    """
    builds: dict[tuple[int, int, int, int], BuildSamples] = {}
    for row in rows:
        key = (row["build_id"], row["host_id"], row["model_id"], row["scenario_id"])
        samples = builds.setdefault(key, BuildSamples(*key, row["started_ms"]))
        samples.values.append(row["value"])
        samples.at_ms = min(samples.at_ms, row["started_ms"])
    return sorted(builds.values(), key=lambda one: one.at_ms)


def configuration_samples(archive: Archive, configuration: ConfigurationRow, metric: str) -> list[BuildSamples]:
    """Return the samples of `configuration` and earlier builds by build, oldest first.

    The earlier builds have the same target, host, model and scenario. The samples of a build are in the order of their
    storage, which is correct even if the calendar clock was changed between two samples.
    """
    rows = archive.reader.select(
        f"SELECT build_id, host_id, model_id, scenario_id, started_ms, {metric} AS value FROM run WHERE target_id = ?"
        f" AND model_id = ? AND scenario_id = ? AND host_id = ? AND ok = 1 AND {metric} IS NOT NULL"
        " AND started_ms <= ? ORDER BY id",
        (
            configuration.target_id,
            configuration.model_id,
            configuration.scenario_id,
            configuration.host_id,
            configuration.last_ms,
        ),
    )
    return _samples_by_build([dict(row) for row in rows])


def judged(
    archive: Archive,
    history: Sequence[BuildSamples],
    values: list[float],
    metric: str,
    level: int,
    min_effect: float = MIN_EFFECT,
) -> Verdict:
    """Return the verdict on a build's samples in a series of builds.

    The result is cached.

    Args:
        archive: the result database.
        history: samples of earlier builds, oldest first.
        values: samples of the build to judge.
        metric: name of the metric.
        level: index in `history` of the newest build with a confirmed change. Builds before it are not compared.
        min_effect: smallest relative change that counts.
    """
    key = ("verdict", metric, level, min_effect, tuple(tuple(one.values) for one in history), tuple(values))
    return archive.keep(
        key,
        lambda: judge(
            [one.values for one in history], values, METRICS[metric].better, known=level, min_effect=min_effect
        ),
    )


def known_level(
    archive: Archive, target_id: int, scenario_ids: frozenset[int], metric: str, history: Sequence[BuildSamples]
) -> int:
    """Return the index in `history` of the newest confirmed change, or 0 without one."""
    changes = archive.answer("confirmed", lambda: _confirmed(archive))
    for place in range(len(history) - 1, -1, -1):
        one = history[place]
        # A scenario whose parameters changed has several ids. A confirmed alert with any of these ids counts.
        if any((target_id, one.host_id, one.build_id, one.model_id, id, metric) in changes for id in scenario_ids):
            return place
    return 0


def _confirmed(archive: Archive) -> frozenset[tuple[Any, ...]]:
    rows = archive.reader.select(
        "SELECT target_id, host_id, build_id, model_id, scenario_id, metric FROM alert WHERE state = 'confirmed'"
    )
    return frozenset(map(tuple, rows))


def _points(
    archive: Archive, grouped: Sequence[BuildSamples], metric: str, level_at: Callable[[Sequence[BuildSamples]], int]
) -> list[Point]:
    fits = _fitted(grouped)
    points: list[Point] = []
    histories: dict[tuple[int, int, int], list[BuildSamples]] = {}
    for one, (level, change) in zip(grouped, fits, strict=True):
        history = histories.setdefault((one.host_id, one.model_id, one.scenario_id), [])
        build = archive.tables.builds[one.build_id]
        low, middle, high = (float(value) for value in np.percentile(one.values, [10, 50, 90]))
        points.append(
            Point(
                build_id=one.build_id,
                sha=archive.tables.labels[one.build_id],
                version=build.version,
                built_ms=build.built_ms,
                at_ms=one.at_ms,
                host_id=one.host_id,
                model_id=one.model_id,
                scenario_id=one.scenario_id,
                values=one.values,
                p10=low,
                p50=middle,
                p90=high,
                level=level,
                change=change,
                verdict=judged(archive, history, one.values, metric, level_at(history)),
            )
        )
        history.append(one)  # after the verdict: a build is compared only with earlier builds
    return points


def _fitted(grouped: Sequence[BuildSamples]) -> list[tuple[float | None, float | None]]:
    """Return the fitted level of each build, and its change from the previous level.

    The change is None if a build has the same level as the previous build. Builds with different hardware, model
    configuration or scenario parameters are fitted separately.
    """
    fits: list[tuple[float | None, float | None]] = []
    for _, same in groupby(grouped, key=lambda one: (one.host_id, one.model_id, one.scenario_id)):
        # Medians, so that one slow sample of a build does not look like a change of level.
        medians = [float(np.median(one.values)) for one in same]
        before: float | None = None
        for level in levels(medians):
            change = None if before is None else level.value / before - 1
            fits.append((level.value, change))
            fits += [(level.value, None)] * (level.end - level.start - 1)
            before = level.value
    return fits


def _marks(archive: Archive, points: Sequence[Point]) -> list[Mark]:
    marks: list[Mark] = []
    tables = archive.tables
    for before, after in pairwise(points):
        if before.host_id != after.host_id:
            changed = hardware(tables.hosts[before.host_id], tables.hosts[after.host_id])
            marks.append(Mark(after.at_ms, "hardware", changed or "other hardware"))
        if before.model_id != after.model_id:
            changed = changes(tables.models[before.model_id].config, tables.models[after.model_id].config)
            marks.append(Mark(after.at_ms, "configuration", changed or "other configuration"))
        if before.scenario_id != after.scenario_id:
            changed = changes(tables.scenarios[before.scenario_id].params, tables.scenarios[after.scenario_id].params)
            marks.append(Mark(after.at_ms, "parameters", changed or "other parameters"))
    return marks
