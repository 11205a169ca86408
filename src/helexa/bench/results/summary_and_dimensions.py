"""The newest results of each target, model and scenario, and the filters' choices."""

from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from helexa.bench.metric_definitions import METRICS
from helexa.bench.results.archive import Archive, gpu_label
from helexa.bench.results.latest_results import LatestResult, latest, scenario_order
from helexa.bench.results.series import HOT, configuration_samples, judged, known_level
from helexa.bench.store.row_types import ConfigurationRow
from helexa.bench.verdicts_and_change_points import Verdict

HEADLINES = {
    "concurrency": "output_tps",
    "rate": "goodput_rps",
    "mixed": "ttft_s",
    "swap": "load_s",
    "cancel": "release_s",
    "correctness": "score",
    "capability": "score",
}
"""Main metric by kind of scenario.

For other kinds, the main metric is the decode rate of one user.
"""
_RECENT_BUILDS = 20


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """The metrics of the newest build for one target, model and scenario.

    If a value has a unit, the field name contains it, for example `_s`, `_mb` or `tps` (tokens per second).
    `headline_median` has the unit of the metric `headline`. `verdict` and `recent` are about this metric: `recent` has
    the medians of up to 20 builds, oldest first.
    """

    target_name: str
    model_id: str
    scenario_id: str
    kind: str
    host_id: int
    hostname: str
    gpu: str
    vram_total_mb: int
    git_sha: str
    version: str
    last_ms: int
    samples: int
    failures: int
    estimated: bool
    prompt_size_approx: int | None
    prompt_tokens: float | None
    cached_tokens: float | None
    ttft_s_median: float | None
    ttft_s_p95: float | None
    ttft_s_p99: float | None
    ttfo_s_median: float | None
    tpot_s_median: float | None
    decode_tps_median: float | None
    output_tps_median: float | None
    total_s_median: float | None
    total_s_p95: float | None
    total_s_p99: float | None
    prefill_ms_median: float | None
    decode_ms_median: float | None
    prefill_tps_median: float | None
    vram_used_mb_median: float | None
    gpu_util_pct_median: float | None
    gpu_temp_c_median: float | None
    concurrency: int | None
    rate_rps: float | None
    ttft_p95_load_s: float | None
    queue_wait_ms_median: float | None
    rejected_median: float | None
    goodput_rps_median: float | None
    goodput_share_median: float | None
    headline: str
    headline_median: float | None
    verdict: Verdict
    recent: list[float] = field(default_factory=list[float])


def summary(archive: Archive, *, target: str | None = None, model: str | None = None) -> list[SummaryRow]:
    """Return a summary row for each target, model and scenario.

    The rows are sorted by target, model and scenario.

    Args:
        archive: the result database.
        target: name of the only target to return, or None for all.
        model: name of the only model to return, or None for all.
    """
    return [
        archive.keep(("summary", result.configuration, result.build), partial(_row, archive, result))
        for result in latest(archive, target=target, model=model)
    ]


def headline_of(kind: str) -> str:
    """Return the name of the main metric of scenarios of this kind."""
    return HEADLINES.get(kind, "output_tps_user")


def _row(archive: Archive, result: LatestResult) -> SummaryRow:
    tables = result.tables
    host, build = tables.hosts[result.configuration.host_id], tables.builds[result.configuration.build_id]
    ttft, total = result.distribution("ttft_s"), result.distribution("e2e_s")
    size = result.param("prompt_tokens")
    headline = headline_of(result.kind)
    verdict, recent = _judge(archive, result.configuration, headline)
    return SummaryRow(
        target_name=result.target,
        model_id=result.model,
        scenario_id=result.scenario,
        kind=result.kind,
        host_id=host.id,
        hostname=host.hostname,
        gpu=gpu_label(host.gpus),
        vram_total_mb=sum(gpu.get("vram_total_mb", 0) for gpu in host.gpus),
        git_sha=result.build,
        version=build.version,
        last_ms=result.configuration.last_ms,
        samples=result.configuration.samples,
        failures=result.configuration.failures,
        estimated=result.any("estimated"),
        prompt_size_approx=size if isinstance(size, int) else None,
        prompt_tokens=result.median("prompt_tokens"),
        cached_tokens=result.median("cached_tokens"),
        ttft_s_median=ttft and ttft.p50,  # None if no sample has the metric
        ttft_s_p95=ttft and ttft.p95,
        ttft_s_p99=ttft and ttft.p99,
        ttfo_s_median=result.median("ttfo_s"),
        tpot_s_median=result.median("tpot_s"),
        decode_tps_median=result.median("output_tps_user"),
        output_tps_median=result.median("output_tps"),
        total_s_median=total and total.p50,
        total_s_p95=total and total.p95,
        total_s_p99=total and total.p99,
        prefill_ms_median=result.median_ms("prefill_s"),
        decode_ms_median=result.median_ms("decode_s"),
        prefill_tps_median=result.median("prefill_tps"),
        vram_used_mb_median=result.median("vram_used_mb"),
        gpu_util_pct_median=result.median("gpu_util_pct"),
        gpu_temp_c_median=result.median("gpu_temp_c"),
        concurrency=next(iter(result.rows), {}).get("concurrency"),
        rate_rps=result.median("rate_rps"),
        ttft_p95_load_s=result.median("ttft_p95_s"),
        queue_wait_ms_median=result.median_ms("queue_s"),
        rejected_median=result.median("rejected"),
        goodput_rps_median=result.median("goodput_rps"),
        goodput_share_median=result.median("goodput_share"),
        headline=headline,
        headline_median=result.median(headline),
        verdict=verdict,
        recent=recent,
    )


def _judge(archive: Archive, configuration: ConfigurationRow, metric: str) -> tuple[Verdict, list[float]]:
    """Compare the build of a benchmark configuration with earlier builds.

    Return the result of the comparison, and the medians of the newest 20 builds, oldest build first.
    """
    builds = configuration_samples(archive, configuration, metric)
    own = next((one.values for one in builds if one.build_id == configuration.build_id), [])
    history = [one for one in builds if one.build_id != configuration.build_id]
    level = known_level(archive, configuration.target_id, frozenset({configuration.scenario_id}), metric, history)
    return judged(archive, history, own, metric, level), [median(one.values) for one in builds[-_RECENT_BUILDS:]]


@dataclass(frozen=True, slots=True)
class Swap:
    """Summary of a model's loads at the newest build: medians of durations."""

    target: str
    model: str
    scenario: str
    build: str
    quant: str
    unload_ms_median: float | None
    load_ms_median: float | None
    load_ms_p95: float | None
    cold_ttft_s_median: float | None
    cold_total_s_median: float | None
    vram_used_mb_median: float | None
    samples: int


def swaps(archive: Archive, *, target: str | None = None, model: str | None = None) -> list[Swap]:
    """Return a summary of load durations for each target, model and scenario.

    Only scenarios that load models are included.
    """
    swap_rows: list[Swap] = []
    for result in latest(archive, target=target, model=model):
        load = result.distribution("load_s")
        if load is None:  # only scenarios that load models have this metric
            continue
        swap_rows.append(
            Swap(
                target=result.target,
                model=result.model,
                scenario=result.scenario,
                build=result.build,
                quant=str(archive.tables.models[result.configuration.model_id].config.get("quant") or ""),
                unload_ms_median=result.median_ms("unload_s"),
                load_ms_median=load.p50 * 1000,
                load_ms_p95=load.p95 * 1000,
                cold_ttft_s_median=result.median("ttft_s"),
                cold_total_s_median=result.median("e2e_s"),
                vram_used_mb_median=result.median("vram_used_mb"),
                samples=load.n,
            )
        )
    return swap_rows


def dimensions(archive: Archive) -> dict[str, Any]:
    """Return the dimensions for filters: targets as `hosts`, newest builds first."""
    return archive.answer("dimensions", lambda: _dimensions(archive))


def _dimensions(archive: Archive) -> dict[str, Any]:
    tables = archive.tables
    configurations = archive.answer("latest", archive.reader.latest_configurations)
    order = sorted(tables.scenarios, key=lambda id: scenario_order(tables, id))
    return {
        "hosts": sorted({row.name for row in tables.targets.values()}),
        "models": sorted({row.name for row in tables.models.values()}),
        "scenarios": list(dict.fromkeys(tables.scenarios[id].name for id in order)),
        "metrics": [
            {"name": metric.name, "title": metric.title, "unit": metric.unit, "better": metric.better}
            for name in HOT
            for metric in [METRICS[name]]
        ],
        "builds": [
            {
                "id": row.id,
                "engine": row.engine,
                "git_sha": row.sha,
                "label": tables.labels[row.id],
                "build_timestamp": row.built_ms,
                "package_version": row.version,
            }
            for row in sorted(tables.builds.values(), key=lambda row: (row.first_seen_ms, row.id), reverse=True)
        ],
        "host_models": _host_models(archive, configurations),
    }


def _host_models(archive: Archive, configurations: list[ConfigurationRow]) -> dict[str, list[str]]:
    tables = archive.tables
    groups: dict[str, set[str]] = {}
    for configuration in configurations:
        groups.setdefault(tables.targets[configuration.target_id].name, set()).add(
            tables.models[configuration.model_id].name
        )
    return {target: sorted(models) for target, models in sorted(groups.items())}
