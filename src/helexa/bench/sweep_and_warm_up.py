"""A sweep: takes the missing samples of all configurations on all targets.

A benchmark configuration consists of a target, its host and build, a model with its configuration, and a scenario. A
new build has new benchmark configurations without samples, so the next sweep measures the new build.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from helexa.bench.client import TargetError
from helexa.bench.config import BenchConfig, ScenariosSection
from helexa.bench.host_build_and_model import Configuration, Identity
from helexa.bench.prompts_and_load_generators import Clock, sample_seed
from helexa.bench.request_records_and_metrics import Objectives, measure_run
from helexa.bench.scenarios.load import Agentic, Concurrency, Mixed, Rate
from helexa.bench.scenarios.quality import Capability, Image, json_correctness, tool_correctness
from helexa.bench.scenarios.scenario import Outcome, Scenario, Subject
from helexa.bench.scenarios.single import Cancel, DecodeAtDepth, Single, Swap
from helexa.bench.servers import Connection, ServedModel, TargetServer
from helexa.bench.store.row_types import Reading, Sample
from helexa.bench.store.writer import Store
from helexa.core.logs import tell


def sweep_scenarios(config: ScenariosSection) -> list[Scenario]:
    """Return the enabled scenarios of a sweep, roughly in the order of their duration."""
    wanted = config.objectives
    objectives = Objectives(wanted.ttft_secs, wanted.tpot_secs, wanted.e2e_secs)
    answer, open_loop, agentic = config.max_tokens, config.open_loop, config.agentic
    scenarios: list[Scenario] = []
    for size in config.prompt_sizes:
        scenarios += [Single(size, answer, "cold"), Single(size, answer, "warm")]
    scenarios += [DecodeAtDepth(depth, answer) for depth in config.decode_depths]
    if config.cancel:
        scenarios.append(Cancel(min(config.prompt_sizes, default=128), answer))
    if config.tools:
        scenarios.append(tool_correctness())
    if config.json_schema:
        scenarios.append(json_correctness())
    scenarios += [
        Capability(probe.name, probe.prompt, probe.max_tokens, tuple(probe.expect))
        for probe in config.capability_probes
    ]
    scenarios += [Image(pixels) for pixels in config.image_sizes]
    if config.probe_prompt_tokens:
        scenarios.append(Mixed(config.probe_prompt_tokens, config.concurrency_secs, answer))
    scenarios += [
        Concurrency(level, config.concurrency_secs, config.concurrency_prompt_tokens, answer, objectives)
        for level in config.concurrency_levels
    ]
    if agentic.conversations:
        scenarios.append(
            Agentic(
                agentic.conversations,
                agentic.turns,
                agentic.system_tokens,
                agentic.tool_tokens,
                agentic.tool_secs,
                answer,
            )
        )
    scenarios += [
        Rate(rate, open_loop.arrivals, open_loop.duration_secs, open_loop.prompt_tokens, answer, objectives)
        for rate in sorted(open_loop.rates)
    ]
    return scenarios


def swap_scenario(config: ScenariosSection) -> Scenario:
    """Return the scenario of the subcommand `swap-cost`."""
    return Swap(min(config.prompt_sizes, default=128), config.max_tokens)


_MOST = 20_000  # maximum number of readings in one sample


@asynccontextmanager
async def watching(server: TargetServer, interval_secs: float, clock: Clock) -> AsyncIterator[list[Reading]]:
    """Provide a list of accelerator readings that grows during the `with` block.

    During the block, the readings are requested from `server` every `interval_secs` seconds, and once more at its end
    unless the block raises. A failed request adds no reading. After 20,000 readings, only the last request is sent.
    """
    start = clock.now()
    readings: list[Reading] = []

    async def look() -> None:
        with suppress(TargetError):  # the target may be too busy to answer
            readings.extend(await server.readings(clock.now() - start))

    async def watch() -> None:
        while len(readings) < _MOST:
            await look()
            await clock.sleep_until(clock.now() + interval_secs)

    watcher = asyncio.create_task(watch())
    try:
        yield readings
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])
    await look()


log = logging.getLogger(__name__)

_WARM_UP = -1  # sample number of warm-up runs, which are not stored
_MOST_RESTARTS = 3


@dataclass(slots=True)
class SweepReport:
    """The result of a sweep, as counts of samples and of benchmark configurations."""

    measured: int = 0  # number of valid samples taken
    failed: int = 0  # number of invalid samples taken
    skipped: int = 0  # number of configurations that already had all required samples
    # the targets that could not be reached, as a dict from the target's name to the error message
    unreachable: dict[str, str] = field(default_factory=dict[str, str])


class TargetChangedError(Exception):
    """The host or the build of a target changed during a sample of a sweep."""


class Sweep:
    """Takes the missing samples of a list of targets.

    Args:
        config: the configuration.
        store: the database.
        clock: source of the current time.
        wanted: function that returns how many valid samples a configuration needs.
    """

    def __init__(self, config: BenchConfig, store: Store, clock: Clock, wanted: Callable[[Configuration], int]) -> None:
        self._config = config.bench
        self._store = store
        self._clock = clock
        self._wanted = wanted
        self.report = SweepReport()

    async def run(self, connections: Iterable[Connection], scenarios: list[Scenario]) -> SweepReport:
        """Measure the targets one after the other, and return the report.

        A target that fails is recorded in the report and skipped. If a target changes during a sample, the sample is
        discarded, and the target is measured again, at most three times in total.
        """
        for connection in connections:
            try:
                await self._target(connection, scenarios)
            except TargetError as error:
                self.report.unreachable[connection.target.name] = str(error)
                tell(log, logging.WARNING, "target unreachable", target=connection.target.name, error=str(error))
        return self.report

    async def _target(self, connection: Connection, scenarios: list[Scenario]) -> None:
        for _ in range(_MOST_RESTARTS):  # limited, because a target that keeps restarting must not delay other targets
            try:
                await self._models(connection, scenarios)
                return
            except TargetChangedError:
                tell(log, logging.INFO, "target changed during a sample", target=connection.target.name)

    async def _models(self, connection: Connection, scenarios: list[Scenario]) -> None:
        identity = await connection.server.identity()
        chosen = connection.section.models
        for model in await connection.server.models():
            if chosen and model.name not in chosen:
                continue
            saturated: set[str] = set()
            for scenario in scenarios:
                key = scenario.key
                if key.kind in saturated or not scenario.suits(model, connection.control):
                    continue
                configuration = Configuration(connection.target, identity.host, identity.build, model.model, key)
                if await self._top_up(connection, identity, configuration, scenario, model):
                    saturated.add(key.kind)

    async def _top_up(
        self,
        connection: Connection,
        identity: Identity,
        configuration: Configuration,
        scenario: Scenario,
        model: ServedModel,
    ) -> bool:
        """Take the missing samples of `configuration`; stop after an invalid sample.

        Return whether the server was saturated in at least one sample of the configuration.
        """
        count, wanted = self._store.count(configuration), self._wanted(configuration)
        if count.good >= wanted:
            self.report.skipped += 1
            return count.saturated
        if scenario.warms_up and not count.good:
            await self._execute(connection, configuration, scenario, model, _WARM_UP)
        saturated = count.saturated
        for extra in range(wanted - count.good):
            await self._clock.sleep_until(self._clock.now() + self._config.iteration_pause_secs)
            sample, outcome = await self._execute(connection, configuration, scenario, model, count.all + extra)
            await self._keep(connection, identity, configuration, sample)
            saturated |= outcome.saturated
            if not sample.ok:
                break  # the next sample would probably fail too, and other configurations wait; the next sweep retries
        return saturated

    async def _keep(
        self, connection: Connection, identity: Identity, configuration: Configuration, sample: Sample
    ) -> None:
        """Store a sample, or raise TargetChangedError if the target changed during it."""
        try:
            same = await connection.server.identity() == identity
        except TargetError:  # The load may have broken the target, so the sample is stored.
            self._record(configuration, sample)
            raise
        if not same:
            raise TargetChangedError
        self._record(configuration, sample)

    def _record(self, configuration: Configuration, sample: Sample) -> None:
        run = self._store.record(configuration, sample)
        self.report.measured += sample.ok
        self.report.failed += not sample.ok
        facts = {
            "run": run,
            "target": configuration.target.name,
            "build": configuration.build.sha,
            "model": configuration.model.name,
        }
        facts["scenario"] = configuration.scenario.name
        if sample.ok:
            tell(log, logging.INFO, "sample", **facts, **_shown(sample))
        else:
            tell(log, logging.WARNING, "sample failed", **facts, error=sample.error)

    async def _execute(
        self, connection: Connection, configuration: Configuration, scenario: Scenario, model: ServedModel, number: int
    ) -> tuple[Sample, Outcome]:
        seed = sample_seed(self._config.seed, configuration.scenario.name, configuration.scenario.params_hash, number)
        salt = secrets.token_hex(8)
        client = connection.client(self._config.request_timeout_secs, self._clock)
        subject = Subject(client, model, self._clock, salt, connection.control)
        started_ms, start = self._clock.calendar_ms(), self._clock.now()
        async with watching(connection.server, self._config.telemetry_interval_secs, self._clock) as readings:
            try:
                outcome = await scenario.run(subject, seed)
            except TargetError as error:
                outcome = Outcome(error=str(error))
            duration = self._clock.now() - start
        measured = outcome.records if outcome.measured is None else outcome.measured
        sample = Sample(
            started_ms=started_ms,
            start=start,
            duration_s=duration,
            seed=seed,
            ok=outcome.error is None,
            error=outcome.error,
            records=list(outcome.records),
            measures=measure_run(measured, outcome.objectives),
            readings=readings,
            artifact=outcome.artifact,
            columns=outcome.columns,
            extra={**outcome.extra, "salt": salt} | ({"saturated": True} if outcome.saturated else {}),
        )
        return sample, outcome


def _shown(sample: Sample) -> dict[str, float]:
    """Return the metrics of a sample that are logged."""
    distributions = sample.measures.distributions if sample.measures else {}
    medians = {
        name: round(distributions[name].p50, 4) for name in ("ttft_s", "tpot_s", "e2e_s") if name in distributions
    }
    return medians | {name: round(value, 4) for name, value in sample.columns.items() if value is not None}
