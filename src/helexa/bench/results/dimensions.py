"""The values by which results can be filtered: targets, models, scenarios, metrics and builds."""

from typing import Any

from helexa.bench.measurement.metrics import METRICS
from helexa.bench.results.archive import Archive
from helexa.bench.results.dimension_tables import gpu_label
from helexa.bench.results.latest import scenario_order
from helexa.bench.results.series import HOT
from helexa.bench.store.rows import ConfigurationRow


def dimensions(archive: Archive) -> dict[str, Any]:
    """Return the names of all targets, models, scenarios, metrics and builds in display order, newest builds first."""
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
        "host_gpus": {
            tables.targets[configuration.target_id].name: gpu_label(tables.hosts[configuration.host_id].gpus)
            for configuration in configurations
        },
        "host_models": _host_models(archive, configurations),
        "model_gpus": _model_gpus(archive, configurations),
    }


def _host_models(archive: Archive, configurations: list[ConfigurationRow]) -> dict[str, list[str]]:
    tables = archive.tables
    groups: dict[str, set[str]] = {}
    for configuration in configurations:
        groups.setdefault(tables.targets[configuration.target_id].name, set()).add(
            tables.models[configuration.model_id].name
        )
    return {target: sorted(models) for target, models in sorted(groups.items())}


def _model_gpus(archive: Archive, configurations: list[ConfigurationRow]) -> dict[str, list[str]]:
    tables = archive.tables
    groups: dict[str, set[str]] = {}
    for configuration in configurations:
        groups.setdefault(tables.models[configuration.model_id].name, set()).add(
            gpu_label(tables.hosts[configuration.host_id].gpus)
        )
    return {model: sorted(label for label in labels if label) for model, labels in groups.items()}
