"""The subcommands that measure: `helexa-bench run`, `once` and `swap-cost`."""

import asyncio
from typing import Annotated, Literal

from cyclopts import Parameter

from helexa.bench.commands.settings import ConfigPath, find_config, read_config

LogFormat = Annotated[Literal["text", "json"], Parameter()]


def run(*, config: ConfigPath = None, log_format: LogFormat = "text") -> None:
    """Measure all targets repeatedly, compare the results with earlier builds, and serve the results.

    Args:
        config: The configuration file.
        log_format: Text lines, or JSON objects.
    """
    from helexa.bench import daemon
    from helexa.bench.config import load
    from helexa.core import logs

    logs.configure(log_format)
    path = find_config(config)
    asyncio.run(daemon.run(load(path), path))


def once(*, config: ConfigPath = None, log_format: LogFormat = "text") -> int:
    """Take all missing samples, once.

    Exit code 1 if a sample failed or a target did not answer, 5 if a metric regressed.

    Args:
        config: The configuration file.
        log_format: Text lines, or JSON objects.
    """
    from helexa.bench import daemon
    from helexa.bench.alerts import EXIT_REGRESSED, AlertMonitor, payload
    from helexa.bench.results.archive import Archive
    from helexa.bench.store.database import measuring
    from helexa.bench.store.store import Store
    from helexa.core import logs

    logs.configure(log_format)
    settings = read_config(config)
    database = settings.bench.db_path
    with measuring(database), Store(database) as store, Archive(database) as archive:
        monitor = AlertMonitor(settings.alerts, store, archive, settings.bench.samples_per_version)
        report, review = asyncio.run(daemon.sweep_and_judge(settings, store, monitor))
    code = _exit_code(report.measured, report.failed, report.skipped, len(report.unreachable))
    for alert in (*review.regressed, *review.improved):
        print(f"{alert.verdict}: {payload(alert)['text']}")
    return EXIT_REGRESSED if review.regressed else code


def swap_cost(*, config: ConfigPath = None, samples: int = 1, log_format: LogFormat = "text") -> int:
    """Measure unloading and loading of every loaded model of every neuron.

    Each model is unavailable during its measurement.

    Args:
        config: The configuration file.
        samples: Number of samples per model.
        log_format: Text lines, or JSON objects.
    """
    from helexa.bench import daemon
    from helexa.bench.scenarios.catalogue import swap_scenario
    from helexa.bench.store.database import measuring
    from helexa.bench.store.store import Store
    from helexa.core import logs

    logs.configure(log_format)
    settings = read_config(config)
    scenario = swap_scenario(settings.scenarios)
    with measuring(settings.bench.db_path), Store(settings.bench.db_path) as store:
        report = asyncio.run(
            daemon.sweep_once(
                settings, store, [scenario], lambda configuration: store.count(configuration).good + samples
            )
        )
    return _exit_code(report.measured, report.failed, report.skipped, len(report.unreachable))


def _exit_code(measured: int, failed: int, skipped: int, unreachable: int) -> int:
    print(f"{measured} measured, {failed} failed, {skipped} configurations complete, {unreachable} targets unreachable")
    return 1 if failed or unreachable else 0
