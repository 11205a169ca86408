"""The newest configuration of each target, model and scenario, with its samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from helexa.bench.request_records_and_metrics import Distribution, distribution
from helexa.bench.results.archive import Archive, DimensionTables
from helexa.bench.store.row_types import ConfigurationRow

_COLUMNS = (
    *("id", "started_ms", "duration_s", "ok", "estimated", "requests", "completed", "rejected", "timed_out", "failed"),
    *("incomplete", "concurrency", "rate_rps", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_s"),
    *("ttft_p95_s", "ttfo_s", "tpot_s", "icl_s", "e2e_s", "e2e_p95_s", "output_tps_user", "output_tps", "prefill_tps"),
    *("prefill_s", "decode_s", "queue_s", "goodput_rps", "goodput_share", "unload_s", "load_s", "release_s", "score"),
    *("vram_used_mb", "gpu_util_pct", "gpu_temp_c"),
)

# Kinds of scenarios in display order. Unlisted kinds are displayed last.
KINDS = ("single", "decode", "concurrency", "rate", "agentic", "mixed", "swap", "cancel", "correctness", "capability")


@dataclass(frozen=True, slots=True)
class LatestResult:
    """A benchmark configuration with its valid samples.

    Each entry of `rows` is one sample with columns of the table `run`. The oldest sample is first.
    """

    configuration: ConfigurationRow
    tables: DimensionTables
    rows: list[dict[str, Any]]

    @property
    def target(self) -> str:
        """Name of the target."""
        return self.tables.targets[self.configuration.target_id].name

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.tables.models[self.configuration.model_id].name

    @property
    def scenario(self) -> str:
        """Name of the scenario."""
        return self.tables.scenarios[self.configuration.scenario_id].name

    @property
    def kind(self) -> str:
        """Kind of the scenario."""
        return self.tables.scenarios[self.configuration.scenario_id].kind

    @property
    def build(self) -> str:
        """Short label of the build."""
        return self.tables.labels[self.configuration.build_id]

    def param(self, name: str) -> Any:
        """Return the scenario's parameter `name`, or None if the scenario lacks it."""
        return self.tables.scenarios[self.configuration.scenario_id].params.get(name)

    def values(self, column: str) -> list[float]:
        """Return the values of `column`, one per sample, oldest sample first.

        Values that are None are omitted.
        """
        return [row[column] for row in self.rows if row[column] is not None]

    def distribution(self, column: str) -> Distribution | None:
        """Return statistics of a column over the samples, or None without values."""
        return distribution(self.values(column))

    def median(self, column: str) -> float | None:
        """Return the median of a column over the samples, or None without values."""
        value = self.distribution(column)
        return value and value.p50

    def median_ms(self, column: str) -> float | None:
        """Return the median of a column in milliseconds, or None if it has no values.

        The column is in seconds.
        """
        value = self.median(column)
        return None if value is None else value * 1000

    def any(self, column: str) -> bool:
        """Return whether the column is true in at least one sample."""
        return any(row[column] for row in self.rows)


def latest(
    archive: Archive, *, target: str | None = None, model: str | None = None, kinds: Sequence[str] = ()
) -> list[LatestResult]:
    """Return the newest configuration of each target, model and scenario.

    A configuration with valid samples takes precedence over a newer one without. Each result contains the valid samples
    of the configuration, if there are any. The results are sorted by target, model and scenario.

    Args:
        archive: the result database.
        target: name of the only target to return, or None for all.
        model: name of the only model to return, or None for all.
        kinds: kinds of scenarios to return. If empty, all kinds are returned.
    """
    tables = archive.tables
    configurations = [
        configuration
        for configuration in archive.answer("latest", archive.reader.latest_configurations)
        if (target is None or tables.targets[configuration.target_id].name == target)
        and (model is None or tables.models[configuration.model_id].name == model)
        and (not kinds or tables.scenarios[configuration.scenario_id].kind in kinds)
    ]
    results = [
        LatestResult(
            configuration,
            tables,
            archive.answer(("runs", configuration), lambda configuration=configuration: _runs(archive, configuration)),
        )
        for configuration in configurations
    ]
    return sorted(
        results,
        key=lambda result: (
            result.target,
            result.model,
            scenario_order(tables, result.configuration.scenario_id),
        ),
    )


def scenario_order(tables: DimensionTables, scenario_id: int) -> tuple[Any, ...]:
    """Return a scenario's sort key: kind in `KINDS`, then name with numbers by value."""
    row = tables.scenarios[scenario_id]
    parts = [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in row.name.split(":")]
    rank = KINDS.index(row.kind) if row.kind in KINDS else len(KINDS)
    return (rank, row.kind, parts)


def by_group(results: Sequence[LatestResult]) -> Iterator[tuple[str, str, list[LatestResult]]]:
    """Yield each target and model with its latest results.

    Args:
        results: the results, sorted by target and model.
    """
    for (target, model), group in groupby(results, key=lambda one: (one.target, one.model)):
        yield target, model, list(group)


def _runs(archive: Archive, configuration: ConfigurationRow) -> list[dict[str, Any]]:
    rows = archive.reader.select(
        f"SELECT {', '.join(_COLUMNS)} FROM run WHERE target_id = ? AND model_id = ? AND scenario_id = ?"
        " AND build_id = ? AND host_id = ? AND ok = 1 ORDER BY started_ms, id",
        (
            configuration.target_id,
            configuration.model_id,
            configuration.scenario_id,
            configuration.build_id,
            configuration.host_id,
        ),
    )
    return [dict(row) for row in rows]
