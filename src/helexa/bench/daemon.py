"""The measuring process: measures all targets again and again.

The web pages are served by a separate process, because serving requests would disturb the measurements.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from helexa.bench.alerts import AlertMonitor, ReviewResult
from helexa.bench.client import open_session
from helexa.bench.config import BenchConfig
from helexa.bench.host_build_and_model import Configuration
from helexa.bench.prompts_and_load_generators import Clock
from helexa.bench.results.archive import Archive
from helexa.bench.scenarios.scenario import Scenario
from helexa.bench.servers import connect
from helexa.bench.store.database import measuring
from helexa.bench.store.writer import Store, prune
from helexa.bench.sweep_and_warm_up import Sweep, SweepReport, sweep_scenarios
from helexa.core.errors import ConfigError
from helexa.core.logs import tell

log = logging.getLogger(__name__)

_LAST_WORDS_SECS = 5.0


async def sweep_once(
    config: BenchConfig,
    store: Store,
    scenarios: list[Scenario] | None = None,
    wanted: Callable[[Configuration], int] | None = None,
    clock: Clock | None = None,
) -> SweepReport:
    """Measure all missing samples of all targets once.

    Args:
        config: the configuration.
        store: the database.
        scenarios: scenarios to measure, or None for the scenarios of the configuration.
        wanted: function that returns how many valid samples a benchmark configuration needs, or None for the
            number in the configuration.
        clock: source of the current time, or None for the system clock.

    Raises:
        ConfigError: the configuration has no targets.
    """
    if not config.targets:
        raise ConfigError(
            "no [[targets]] are configured, so there is nothing to measure; add one to the configuration file"
        )
    sweep = Sweep(config, store, clock or Clock(), wanted or (lambda configuration: config.bench.samples_per_version))
    async with open_session() as session:
        connections = [connect(section, session) for section in config.targets]
        return await sweep.run(connections, sweep_scenarios(config.scenarios) if scenarios is None else scenarios)


async def sweep_and_judge(config: BenchConfig, store: Store, monitor: AlertMonitor) -> tuple[SweepReport, ReviewResult]:
    """Measure missing samples, compare builds, report regressions to the webhook.

    If the comparison suspects a change, more samples are measured and the comparison is repeated. The returned review
    then has the alerts of both comparisons. In the report, only `measured` and `failed` include the additional samples.

    Raises:
        ConfigError: the configuration has no targets.
    """
    report = await sweep_once(config, store, wanted=monitor.wanted)
    review = monitor.review()
    if review.suspected:
        more = await sweep_once(config, store, wanted=monitor.wanted)
        report.measured += more.measured
        report.failed += more.failed
        again = monitor.review()
        # Each review lists only the alerts that it has confirmed itself.
        regressed, improved = [*review.regressed, *again.regressed], [*review.improved, *again.improved]
        review = ReviewResult(again.suspected, regressed, improved)
    await monitor.deliver()
    return report, review


async def run(config: BenchConfig, path: Path | None) -> None:
    """Measure until SIGINT or SIGTERM.

    A sample that is incomplete at that time is discarded.

    Args:
        config: the configuration.
        path: path of the configuration file, which is passed to the process that serves the pages.

    Raises:
        HelexaError: the configuration has no targets, or the database cannot be opened.
    """
    if not config.targets:
        raise ConfigError(
            "no [[targets]] are configured, so there is nothing to measure; add one to the configuration file"
        )
    database = config.bench.db_path
    with measuring(database), Store(database) as store, Archive(database) as archive:
        monitor = AlertMonitor(config.alerts, store, archive, config.bench.samples_per_version)
        work = asyncio.create_task(_work(config, store, monitor, path))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, work.cancel)
        with suppress(asyncio.CancelledError):
            await work


async def _work(config: BenchConfig, store: Store, monitor: AlertMonitor, path: Path | None) -> None:
    pages = PagesProcess(path) if config.api.enabled else None
    clock = Clock()
    try:
        while True:
            begin = clock.now()
            if pages is not None:
                await pages.ensure()
            if config.bench.request_retention_days:
                prune(store, config.bench.request_retention_days)
            report, review = await sweep_and_judge(config, store, monitor)
            tell(
                log,
                logging.INFO,
                "sweep done",
                measured=report.measured,
                failed=report.failed,
                skipped=report.skipped,
                unreachable=len(report.unreachable),
                suspected=review.suspected,
                regressed=len(review.regressed),
                improved=len(review.improved),
                seconds=round(clock.now() - begin),
            )
            await clock.sleep_until(begin + config.bench.sweep_interval_secs)
    finally:
        if pages is not None:
            await pages.end()


class PagesProcess:
    """The child process that serves the web pages and the API."""

    def __init__(self, path: Path | None) -> None:
        self._arguments = ["serve", *(["--config", str(path)] if path is not None else [])]
        self._process: asyncio.subprocess.Process | None = None

    async def ensure(self) -> None:
        """Start the process if it is not running."""
        if self._process is not None and self._process.returncode is None:
            return
        if self._process is not None:
            tell(log, logging.WARNING, "pages process ended and is restarted", code=self._process.returncode)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "helexa.bench", *self._arguments),
            stdin=asyncio.subprocess.DEVNULL,
        )

    async def end(self) -> None:
        """Terminate the process and wait for its exit. After a timeout, kill it."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(_LAST_WORDS_SECS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
