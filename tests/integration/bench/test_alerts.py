"""Alerts: how many samples a slow build needs until it is reported."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from helexa.bench.alerts import AlertMonitor
from helexa.bench.config import AlertsSection, BenchConfig
from helexa.bench.daemon import sweep_and_judge
from helexa.bench.host_build_and_model import Build, Configuration, Host, Model, ScenarioKey, Target
from helexa.bench.results.archive import Archive
from helexa.bench.store.row_types import Sample
from helexa.bench.store.writer import Store, now_ms

SAMPLES = 5


class Bench:
    """Records samples of one model with chosen times per output token.

    Attributes:
        calendar_ms: offset of the samples' wall-clock times in milliseconds.
        model: name of the model.
    """

    def __init__(self, store: Store, archive: Archive, **options: Any) -> None:
        self._store = store
        self._rng = random.Random(4)
        self._config = AlertsSection(metrics=["tpot_s"], **options)
        self._archive = archive
        self.monitor = AlertMonitor(self._config, store, archive, SAMPLES)
        self.calendar_ms = 0
        self.model = "model"

    def configuration(self, build: int) -> Configuration:
        return Configuration(
            Target("beast", "neuron", "http://beast"),
            Host("beast"),
            Build("helexa", f"build{build}"),
            Model(self.model),
            ScenarioKey("single:cold:128", "single"),
        )

    def top_up(self, build: int, tpot: float) -> int:
        """Record the samples that the monitor wants of a build; return how many samples the build then has."""
        configuration = self.configuration(build)
        wanted = self.monitor.wanted(configuration)
        for _ in range(wanted - self._store.count(configuration).good):
            value = tpot * self._rng.gauss(1, 0.01)
            sample = Sample(now_ms() + self.calendar_ms, 0.0, 1.0, None, True, columns={"tpot_s": value})
            self._store.record(configuration, sample)
        return wanted

    def restart(self) -> None:
        """Replace the monitor, as a restart of the daemon does."""
        self.monitor = AlertMonitor(self._config, self._store, self._archive, SAMPLES)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[tuple[Store, Archive]]:
    path = tmp_path / "bench.sqlite"
    with Store(path) as store, Archive(path) as archive:
        yield store, archive


def settle(bench: Bench, builds: int) -> None:
    for number in range(builds):
        bench.top_up(number, 0.010)
        assert bench.monitor.review().suspected == 0


def test_slow_build_is_measured_again_and_reported_as_a_regression_once(database):
    bench = Bench(*database)
    settle(bench, 4)
    assert bench.top_up(4, 0.0109) == SAMPLES
    first = bench.monitor.review()
    assert (first.suspected, first.regressed) == (1, [])
    assert bench.top_up(4, 0.0109) == SAMPLES + 3
    second = bench.monitor.review()
    assert second.suspected == 0
    (alert,) = second.regressed
    assert (alert.build, alert.metric, alert.samples) == ("build4", "tpot_s", 8)
    assert alert.ratio == pytest.approx(1.09, abs=0.02)
    assert bench.monitor.review().regressed == []
    for build in range(5, 8):  # the new level is known and raises no further alert
        bench.top_up(build, 0.0109)
        review = bench.monitor.review()
        assert (review.suspected, review.regressed, review.improved) == (0, [], [])
    bench.top_up(8, 0.010)
    assert bench.monitor.review().suspected == 1
    bench.top_up(8, 0.010)
    assert [alert.build for alert in bench.monitor.review().improved] == ["build8"]


def test_suspected_slowdown_is_dismissed_if_new_samples_are_normal(database):
    bench = Bench(*database)
    settle(bench, 4)
    bench.top_up(4, 0.0109)
    assert bench.monitor.review().suspected == 1
    bench.top_up(4, 0.010)
    review = bench.monitor.review()
    assert (review.suspected, review.regressed) == (0, [])
    (row,) = database[1].reader.alerts()
    assert row.state == "dismissed"
    assert bench.monitor.wanted(bench.configuration(4)) == SAMPLES


def test_suspected_slowdown_survives_a_restart_of_the_daemon(database):
    bench = Bench(*database)
    settle(bench, 4)
    bench.top_up(4, 0.012)
    bench.monitor.review()
    bench.restart()
    assert bench.monitor.review().suspected == 1
    bench.top_up(4, 0.012)
    assert len(bench.monitor.review().regressed) == 1


async def test_alert_of_the_first_review_is_returned_if_another_change_needs_a_second_review(database):
    slow, other = Bench(*database), Bench(*database)
    other.model = "other"
    settle(slow, 4)
    settle(other, 4)
    slow.top_up(4, 0.012)
    assert slow.monitor.review().suspected == 1
    slow.top_up(4, 0.012)
    other.top_up(4, 0.012)
    unreachable = {"name": "beast", "endpoint": "http://127.0.0.1:9"}
    config = BenchConfig.model_validate({"targets": [unreachable]})
    _, review = await sweep_and_judge(config, database[0], slow.monitor)
    assert (review.suspected, [alert.model for alert in review.regressed]) == (1, ["model"])


@pytest.mark.parametrize("ahead_ms", [0, 3_600_000, -3_600_000])
@pytest.mark.parametrize("then_ms", [0, 3_600_000, -3_600_000])
def test_jump_of_the_wall_clock_does_not_change_the_verdict_on_a_suspected_slowdown(database, ahead_ms, then_ms):
    """A suspicion is confirmed by samples recorded after it, whatever their wall-clock times are."""
    bench = Bench(*database)
    bench.calendar_ms = -86_400_000
    settle(bench, 4)
    bench.calendar_ms = ahead_ms
    bench.top_up(4, 0.0109)
    assert bench.monitor.review().suspected == 1
    waiting = bench.monitor.review()
    assert (waiting.suspected, waiting.regressed) == (1, [])
    bench.calendar_ms = then_ms
    assert bench.top_up(4, 0.010) == SAMPLES + 3  # the first samples were slow by chance
    assert (bench.monitor.review().suspected, database[1].reader.alerts()[0].state) == (0, "dismissed")


@pytest.mark.parametrize(("samples", "warned"), [(SAMPLES - 1, True), (SAMPLES, False)])
def test_configured_sample_count_too_small_for_a_verdict_logs_a_warning(database, caplog, samples, warned):
    AlertMonitor(AlertsSection(), *database, samples)
    assert ("a comparison needs 5 samples of each build" in caplog.text) == warned


async def test_alert_is_sent_to_the_webhook_repeatedly_until_sending_succeeds(database):
    payloads: list[dict[str, Any]] = []
    statuses = [503, 200]

    async def receive(request: web.Request) -> web.Response:
        payloads.append(await request.json())
        return web.Response(status=statuses[len(payloads) - 1])

    app = web.Application()
    app.router.add_post("/hook", receive)
    async with TestServer(app) as server:
        bench = Bench(*database, webhook=str(server.make_url("/hook")))
        settle(bench, 4)
        bench.top_up(4, 0.012)
        bench.monitor.review()
        bench.top_up(4, 0.012)
        bench.monitor.review()
        assert [await bench.monitor.deliver() for _ in range(3)] == [0, 1, 0]
    assert payloads[0] == payloads[1]
    assert payloads[0]["event"] == "regressed"
    assert payloads[0]["build"] == "build4"
    assert payloads[0]["text"].startswith("model, single:cold:128 on beast: TPOT +")


async def test_alert_that_cannot_be_sent_to_the_webhook_is_logged_without_the_url(database, caplog):
    bench = Bench(*database, webhook="http://127.0.0.1:9/secret-path")
    settle(bench, 4)
    bench.top_up(4, 0.012)
    bench.monitor.review()
    bench.top_up(4, 0.012)
    bench.monitor.review()
    assert await bench.monitor.deliver() == 0
    assert "webhook failed alert=" in caplog.text
    assert "secret-path" not in caplog.text
