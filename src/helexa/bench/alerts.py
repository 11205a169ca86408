"""Detects speed changes between builds and reports regressions to a webhook.

A verdict is the result of comparing the samples of a new build with the samples of earlier builds. A suspected change
is confirmed only after more samples are taken. After a confirmed change, later builds are not compared with builds from
before the change. A slowdown that remains in all later builds therefore raises only one alert.
"""

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp

from helexa.bench.config import AlertsSection
from helexa.bench.host_build_and_model import Configuration
from helexa.bench.metric_definitions import METRICS
from helexa.bench.results.archive import Archive
from helexa.bench.results.series import BuildSamples, configuration_samples, judged, known_level
from helexa.bench.store.row_types import AlertRow, ConfigurationIds, ConfigurationRow
from helexa.bench.store.writer import Store, now_ms
from helexa.bench.verdicts_and_change_points import MIN_SAMPLES, Verdict, confirms
from helexa.core.logs import tell


@dataclass(frozen=True, slots=True)
class Alert:
    """A change of one metric between a build and earlier builds.

    Attributes:
        state: `suspected` until more samples have been taken, then `confirmed` or `dismissed`.
        ratio, ratio_low, ratio_high: median of the build divided by the median of the earlier builds, and the bounds of
            its confidence interval.
        baseline: labels of the earlier builds.
        delivered_ms: time at which the webhook accepted the alert, or None.
    """

    id: int
    target: str
    model: str
    scenario: str
    build: str
    metric: str
    better: str
    state: str
    verdict: str
    ratio: float
    ratio_low: float
    ratio_high: float
    threshold: float
    samples: int
    baseline_samples: int
    baseline: list[str]
    raised_ms: int
    updated_ms: int
    delivered_ms: int | None


_AS_STORED = Alert.__dataclass_fields__.keys() & AlertRow.__dataclass_fields__.keys()


def alerts(
    archive: Archive, *, target: str | None = None, model: str | None = None, state: str | None = None, limit: int = 500
) -> list[Alert]:
    """Return alerts, newest first, with the given target, model and state.

    None matches every value.

    The newest `limit` alerts are read first and then filtered, so the result may have fewer than `limit` alerts.
    """
    tables = archive.tables
    alert_rows = [
        Alert(
            **{name: getattr(row, name) for name in _AS_STORED},
            target=tables.targets[row.target_id].name,
            model=tables.models[row.model_id].name,
            scenario=tables.scenarios[row.scenario_id].name,
            build=tables.labels[row.build_id],
            better=METRICS[row.metric].better,
            baseline=[tables.labels[id] for id in row.baseline_builds if id in tables.labels],
        )
        for row in archive.reader.alerts(limit)
    ]
    return [
        one
        for one in alert_rows
        if target in (None, one.target) and model in (None, one.model) and state in (None, one.state)
    ]


log = logging.getLogger(__name__)

EXIT_REGRESSED = 5
_WEBHOOK_SECS = 10.0
_MOST_DELIVERED = 100
_ALL = 2**31

Key = tuple[ConfigurationIds, str]


@dataclass(slots=True)
class ReviewResult:
    """The result of a review, which compares the newest builds with earlier builds.

    Attributes:
        suspected: number of changes that need more samples before they are confirmed or dismissed.
        regressed: alerts of slowdowns that this review has confirmed.
        improved: alerts of speedups that this review has confirmed.
    """

    suspected: int = 0
    regressed: list[Alert] = field(default_factory=list[Alert])
    improved: list[Alert] = field(default_factory=list[Alert])


class AlertMonitor:
    """Compares the samples of new builds with those of earlier builds.

    If the samples differ, more samples are taken, which confirm or dismiss the change.

    Args:
        config: the `[alerts]` section of the configuration.
        store: the database, opened for writing.
        archive: the same database, opened for reading.
        samples: number of valid samples that are normally taken of each benchmark configuration.
    """

    def __init__(self, config: AlertsSection, store: Store, archive: Archive, samples: int) -> None:
        self._config = config
        self._store = store
        self._archive = archive
        self._samples = samples
        self._wanted: dict[tuple[str, ...], int] = {}
        if samples < MIN_SAMPLES:
            log.warning(
                "builds cannot be compared samples_per_version=%d; "
                "a comparison needs %d samples of each build: raise samples_per_version",
                *(samples, MIN_SAMPLES),
            )

    def wanted(self, configuration: Configuration) -> int:
        """Return the number of valid samples that `configuration` needs.

        The number is higher if the last `review` suspected a change of one of its metrics. Before the first `review`,
        it is always the normal number.
        """
        return self._wanted.get(configuration.natural_key, self._samples)

    def review(self) -> ReviewResult:
        """Compare the newest build of each configuration with earlier builds.

        A new change is stored as an alert in the state `suspected`. The first review after enough additional samples
        have been taken confirms or dismisses the alert.
        """
        known = {_key(row): row for row in self._rows()}
        review = ReviewResult()
        for configuration in self._archive.reader.latest_configurations():
            if configuration.samples:
                for metric in self._config.metrics:
                    self._look(configuration, metric, known, review)
        self._wanted = self._more_wanted()
        known_ids = {row.id for row in known.values() if row.state == "confirmed"}
        fresh = [alert for alert in self._alerts("confirmed") if alert.id not in known_ids]
        review.regressed = [alert for alert in fresh if alert.verdict == "regressed"]
        review.improved = [alert for alert in fresh if alert.verdict == "improved"]
        return review

    async def deliver(self) -> int:
        """Send the oldest 100 confirmed regressions that the webhook has not accepted.

        After a failed request, the remaining regressions wait for the next call.

        Returns:
            The number of regressions that the webhook accepted. 0 if no webhook is configured.
        """
        if self._config.webhook is None:
            return 0
        waiting = [
            row
            for row in self._rows()
            if row.state == "confirmed" and row.verdict == "regressed" and row.delivered_ms is None
        ][-_MOST_DELIVERED:]
        alerts_by_id = {alert.id: alert for alert in self._alerts("confirmed")} if waiting else {}
        delivered = 0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_WEBHOOK_SECS)) as session:
            for row in waiting:
                if not await self._post(session, alerts_by_id[row.id]):
                    break  # the next call of `deliver` sends this and the remaining alerts
                self._put(row, {"delivered_ms": now_ms()})
                delivered += 1
        return delivered

    async def _post(self, session: aiohttp.ClientSession, alert: Alert) -> bool:
        assert self._config.webhook is not None
        try:
            async with session.post(self._config.webhook.get_secret_value(), json=payload(alert)) as answer:
                if answer.status < 300:
                    return True
                reason = f"status {answer.status}"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reason = type(error).__name__  # the error's text may contain the address, which is a secret
        tell(log, logging.WARNING, "webhook failed", alert=alert.id, error=reason)
        return False

    def _look(
        self, configuration: ConfigurationRow, metric: str, known: dict[Key, AlertRow], review: ReviewResult
    ) -> None:
        alert = known.get((configuration.ids, metric))
        if alert is not None and alert.state != "suspected":
            return
        builds = self._archive.keep(
            ("samples", configuration, metric), partial(configuration_samples, self._archive, configuration, metric)
        )
        build_samples = next((build for build in builds if build.build_id == configuration.build_id), None)
        if build_samples is None:
            return
        history = [build for build in builds if build.build_id != configuration.build_id]
        level = known_level(
            self._archive, configuration.target_id, frozenset({configuration.scenario_id}), metric, history
        )
        verdict = judged(self._archive, history, build_samples.values, metric, level, self._config.min_effect)
        if alert is None:
            if verdict.state in ("regressed", "improved"):
                review.suspected += 1
                self._raise(configuration, metric, history, verdict)
            return
        first, extra = build_samples.values[: alert.samples], build_samples.values[alert.samples :]
        if len(extra) < self._config.extra_samples:
            review.suspected += 1
            return
        confirmed = verdict.state == alert.verdict and (not extra or confirms(verdict, first, extra))
        self._put(alert, {"state": "confirmed" if confirmed else "dismissed", **_numbers(verdict, alert)})

    def _raise(
        self, configuration: ConfigurationRow, metric: str, history: list[BuildSamples], verdict: Verdict
    ) -> None:
        assert verdict.interval is not None
        now = now_ms()
        builds = [build.build_id for build in history[-verdict.trailing_builds :]]
        self._store.put_alert(
            configuration.ids._asdict()
            | {
                "metric": metric,
                "state": "suspected",
                "verdict": verdict.state,
                "ratio": verdict.interval.ratio,
                "ratio_low": verdict.interval.low,
                "ratio_high": verdict.interval.high,
                "threshold": verdict.threshold,
                "samples": verdict.samples,
                "baseline_samples": verdict.trailing_samples,
                "baseline_builds": builds,
                "raised_ms": now,
                "updated_ms": now,
                "delivered_ms": None,
            }
        )

    def _put(self, alert: AlertRow, changes: dict[str, Any]) -> None:
        columns = {name: getattr(alert, name) for name in AlertRow.__dataclass_fields__ if name != "id"}
        self._store.put_alert(columns | {"updated_ms": now_ms()} | changes)

    def _rows(self) -> list[AlertRow]:
        return self._archive.reader.alerts(limit=_ALL)

    def _alerts(self, state: str) -> list[Alert]:
        return alerts(self._archive, state=state, limit=_ALL)

    def _more_wanted(self) -> dict[tuple[str, ...], int]:
        tables = self._archive.tables
        wanted: dict[tuple[str, ...], int] = {}
        for row in self._rows():
            if row.state == "suspected":
                host, build = tables.hosts[row.host_id], tables.builds[row.build_id]
                model, scenario = tables.models[row.model_id], tables.scenarios[row.scenario_id]
                key = (
                    *(tables.targets[row.target_id].name, host.hostname, host.fingerprint),
                    *(build.engine, build.sha, build.fingerprint),
                    *(model.name, model.config_hash, scenario.name, scenario.params_hash),
                )
                wanted[key] = max(wanted.get(key, 0), row.samples + self._config.extra_samples)
        return wanted


def payload(alert: Alert) -> dict[str, Any]:
    """Return the JSON body of the webhook request for `alert`.

    The field `text` describes the alert in one sentence. Chat services such as Slack display this field.
    """
    change = (alert.ratio - 1) * 100
    return {
        "text": f"{alert.model}, {alert.scenario} on {alert.target}: {METRICS[alert.metric].title} {change:+.1f} %"
        f" with build {alert.build}",
        "event": alert.verdict,
        "target": alert.target,
        "model": alert.model,
        "scenario": alert.scenario,
        "metric": alert.metric,
        "build": alert.build,
        "baseline": alert.baseline,
        "ratio": alert.ratio,
        "interval": [alert.ratio_low, alert.ratio_high],
        "threshold": alert.threshold,
        "samples": alert.samples,
        "baseline_samples": alert.baseline_samples,
        "raised_ms": alert.raised_ms,
    }


def _key(row: AlertRow) -> Key:
    return (row.ids, row.metric)


def _numbers(verdict: Verdict, alert: AlertRow) -> dict[str, Any]:
    interval = verdict.interval
    return {
        "ratio": interval.ratio if interval else alert.ratio,
        "ratio_low": interval.low if interval else alert.ratio_low,
        "ratio_high": interval.high if interval else alert.ratio_high,
        "samples": verdict.samples,
    }
