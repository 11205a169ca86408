"""Compares two builds, targets or engines: ratios of medians."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from helexa.bench.metric_definitions import METRICS
from helexa.bench.results.archive import Archive, DimensionTables, hardware_label
from helexa.bench.results.latest_results import latest, scenario_order
from helexa.bench.store.row_types import ConfigurationIds, HostRow
from helexa.bench.verdicts_and_change_points import MIN_EFFECT, MIN_SAMPLES, Interval, median_ratio


def hardware(old: HostRow, new: HostRow) -> str:
    """Return the differences in name, devices, driver and CUDA of two hosts, if any."""
    return changes(_facts(old), _facts(new))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the different entries of two dicts as `name old → new`."""
    names = sorted(old.keys() | new.keys())
    return ", ".join(f"{name} {old.get(name)} → {new.get(name)}" for name in names if old.get(name) != new.get(name))


def differences(tables: DimensionTables, a: ConfigurationIds, b: ConfigurationIds) -> list[str]:
    """Return the differences of two configurations other than the build.

    The differences are the target, the hardware, the model configuration and the scenario parameters.
    """
    texts: list[str] = []
    if a.target_id != b.target_id:
        texts.append(f"target {tables.targets[a.target_id].name} → {tables.targets[b.target_id].name}")
    if a.host_id != b.host_id:
        texts.append(hardware(tables.hosts[a.host_id], tables.hosts[b.host_id]) or "other hardware")
    if a.model_id != b.model_id:
        texts.append(changes(tables.models[a.model_id].config, tables.models[b.model_id].config))
    if a.scenario_id != b.scenario_id:
        texts.append(changes(tables.scenarios[a.scenario_id].params, tables.scenarios[b.scenario_id].params))
    return texts


def _facts(host: HostRow) -> dict[str, str]:
    return {
        "host": host.hostname,
        "device": hardware_label(host),
        "driver": host.driver_version,
        "CUDA": host.cuda_version,
    }


COMPARED = ("ttft_s", "tpot_s", "output_tps_user", "output_tps", "prefill_tps", "load_s", "goodput_rps")
_SHORTEST_SHA = 6


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two sides of a comparison: a build, a target, or a build on a target."""

    build: str | None = None
    target: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Side":
        """Return the side that the text `build`, `@target` or `build@target` names."""
        build, _, target = text.partition("@")
        return cls(build or None, target or None)

    def __str__(self) -> str:
        return (self.build or "") + (f"@{self.target}" if self.target else "")


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """The comparison of one metric between sides A and B, for one model and scenario.

    Attributes:
        target: the target on which both sides were measured. Empty if one of the sides names a target.
        a, b: medians of the samples of each side.
        ratio: median of B divided by median of A, with confidence interval. None if `state` is `too few`.
        differs: other differences between the sides: target, hardware, model configuration, scenario parameters.
        state: verdict on B relative to A. `too few`: a side has fewer than 5 samples, or `a` is 0.
    """

    target: str
    model: str
    scenario: str
    metric: str
    unit: str
    better: str
    a: float
    b: float
    samples_a: int
    samples_b: int
    ratio: Interval | None
    state: Literal["improved", "regressed", "same", "too few"]
    differs: list[str] = field(default_factory=list[str])


def compare(
    archive: Archive, a: Side, b: Side, *, model: str | None = None, metrics: Sequence[str] = COMPARED
) -> list[MetricComparison]:
    """Compare two sides.

    Return one comparison for each model, scenario and metric that was measured on both sides.

    If a side has several builds, only the build that was measured last is used, for each model and scenario. If no side
    names a target, each target is compared separately.

    Args:
        archive: the result database.
        a: the baseline.
        b: the side to judge.
        model: name of the only model to compare, or None for all.
        metrics: names of the metrics to compare.

    Raises:
        LookupError: a side has no measurements, or names an unknown build.
    """
    return archive.answer(("compare", a, b, model, *metrics), lambda: _compare(archive, a, b, model, metrics))


def _compare(archive: Archive, a: Side, b: Side, model: str | None, metrics: Sequence[str]) -> list[MetricComparison]:
    # If a side names a target, the two sides may have different targets. The keys by which samples of both sides are
    # matched then must not contain the target.
    apart = a.target is None and b.target is None
    left, right = (_samples(archive, side, model, metrics, apart) for side in (a, b))
    tables = archive.tables
    rank = {row.name: scenario_order(tables, row.id) for row in tables.scenarios.values()}
    compared: list[MetricComparison] = []
    for key in sorted(left.keys() & right.keys(), key=lambda key: (*key[:2], rank[key[2]])):
        differs = differences(tables, left[key].configuration, right[key].configuration)
        for metric in metrics:
            mine, theirs = left[key].values(metric), right[key].values(metric)
            if mine and theirs:
                compared.append(_compared(*key, metric, mine, theirs, differs))
    return compared


def _compared(
    target: str,
    model: str,
    scenario: str,
    metric: str,
    mine: list[float],
    theirs: list[float],
    differs: list[str],
) -> MetricComparison:
    about = METRICS[metric]
    enough = min(len(mine), len(theirs)) >= MIN_SAMPLES and median(mine) > 0
    ratio = median_ratio([mine], theirs) if enough else None
    state: Any = "too few" if ratio is None else "same"
    # The ratio must also differ enough from 1: with many samples, the interval excludes 1 even if no user would notice
    # the difference.
    if ratio is not None and ratio.excludes_one() and abs(ratio.ratio - 1) > MIN_EFFECT:
        state = "regressed" if (ratio.ratio > 1) == (about.better == "lower") else "improved"
    return MetricComparison(
        target=target,
        model=model,
        scenario=scenario,
        metric=metric,
        unit=about.unit,
        better=about.better,
        a=median(mine),
        b=median(theirs),
        samples_a=len(mine),
        samples_b=len(theirs),
        ratio=ratio,
        state=state,
        differs=differs,
    )


@dataclass(frozen=True, slots=True)
class _Samples:
    """The samples of one benchmark configuration, as database rows."""

    configuration: ConfigurationIds
    rows: list[Mapping[str, Any]]

    def values(self, metric: str) -> list[float]:
        return [row[metric] for row in self.rows if row[metric] is not None]


Rows = dict[tuple[str, str, str], _Samples]


def _samples(archive: Archive, side: Side, model: str | None, metrics: Sequence[str], apart: bool) -> Rows:
    """Return the samples of one side, by target, model and scenario.

    Each key has only the samples of the most recently measured configuration. If `apart` is False, the target in the
    keys is an empty string.

    Raises:
        LookupError: the side has no measurements.
    """
    if side.build is None:
        results = latest(archive, target=side.target, model=model)
        samples = {
            (result.target if apart else "", result.model, result.scenario): _Samples(
                result.configuration.ids, [*result.rows]
            )
            for result in results
            if result.rows
        }
    else:
        samples = _samples_of_build(archive, _builds(archive, side.build), side.target, model, metrics, apart)
    if not samples:
        raise LookupError(f"nothing was measured of '{side}'; name a measured `build`, `@target` or `build@target`")
    return samples


def _samples_of_build(
    archive: Archive, builds: list[int], target: str | None, model: str | None, metrics: Sequence[str], apart: bool
) -> Rows:
    rows = archive.reader.select(
        f"SELECT {', '.join(f'run.{name}' for name in (*ConfigurationIds._fields, *metrics))}, model.name AS model,"
        " scenario.name AS scenario FROM run"
        " JOIN model ON model.id = run.model_id JOIN scenario ON scenario.id = run.scenario_id"
        f" WHERE run.ok AND run.build_id IN ({', '.join('?' * len(builds))}) AND (? IS NULL OR model.name = ?)"
        " AND (? IS NULL OR run.target_id = (SELECT id FROM target WHERE name = ?))"
        " ORDER BY run.started_ms DESC, run.id DESC",
        (*builds, model, model, target, target),
    )
    samples: Rows = {}
    for row in map(dict, rows):
        configuration = ConfigurationIds(*(row[name] for name in ConfigurationIds._fields))
        where = archive.tables.targets[configuration.target_id].name if apart else ""
        entry = samples.setdefault((where, row["model"], row["scenario"]), _Samples(configuration, []))
        # The newest row is first and determines the configuration. Rows of other configurations are skipped.
        if entry.configuration == configuration:
            entry.rows.append(row)
    return samples


def _builds(archive: Archive, name: str) -> list[int]:
    builds, labels = archive.tables.builds, archive.tables.labels
    samples = [
        id
        for id, row in builds.items()
        if name in (labels[id], row.sha, row.sha_long, row.version)
        or (len(name) >= _SHORTEST_SHA and row.sha_long.startswith(name))
    ]
    if not samples:
        newest = sorted(builds.values(), key=lambda row: -row.first_seen_ms)[:8]
        raise LookupError(
            f"no build is called '{name}'; newest builds: {', '.join(labels[row.id] for row in newest) or 'none'}"
        )
    return samples
