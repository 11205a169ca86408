"""Describes how two measurements differ besides their builds, in hardware and configuration."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from helexa.bench.results.dimension_tables import DimensionTables, hardware_label
from helexa.bench.store.rows import ConfigurationRow, HostRow


class ConfigurationIds(NamedTuple):
    """The row ids of a benchmark configuration: target, host, build, model and scenario."""

    target_id: int
    host_id: int
    build_id: int
    model_id: int
    scenario_id: int


def configuration_ids(configuration: ConfigurationRow) -> ConfigurationIds:
    """Return the row ids of `configuration`."""
    return ConfigurationIds(
        configuration.target_id,
        configuration.host_id,
        configuration.build_id,
        configuration.model_id,
        configuration.scenario_id,
    )


def hardware(old: HostRow, new: HostRow) -> str:
    """Return a text that lists the differences of two hosts in name, device, driver and CUDA version. Empty if none."""
    return changes(_facts(old), _facts(new))


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return a text that lists the entries that differ between two dicts, each as `name old → new`. Empty if none."""
    names = sorted(old.keys() | new.keys())
    return ", ".join(f"{name} {old.get(name)} → {new.get(name)}" for name in names if old.get(name) != new.get(name))


def differences(tables: DimensionTables, a: ConfigurationIds, b: ConfigurationIds) -> list[str]:
    """Return texts that describe the differences of two benchmark configurations other than the build.

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
