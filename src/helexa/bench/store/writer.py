"""Writes measurements to the database, each sample in one transaction.

Old requests and readings can be deleted (see `prune`). Samples and their percentiles are kept.
"""

import json
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self

from helexa.bench.host_build_and_model import Build, Configuration, Host, Model, ScenarioKey, Target
from helexa.bench.store.database import StoreError, open_writer
from helexa.bench.store.row_types import ConfigurationIds, Sample
from helexa.bench.store.sample_to_rows import columns_of, request_rows
from helexa.core.version import __version__


class SampleCount(NamedTuple):
    """How many samples of one benchmark configuration are stored.

    `good` is the number of valid samples, `all` the number of all samples. `saturated` is True if the server was
    saturated in at least one sample.
    """

    good: int
    all: int
    saturated: bool


class Store:
    """The database, opened for writing. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._connection = open_writer(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection within a transaction.

        The transaction is rolled back if the `with` block raises. Transactions cannot be nested, so the block must not
        call `record`, `score`, `put_alert` or `prune`.
        """
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def count(self, configuration: Configuration) -> SampleCount:
        """Return how many samples of `configuration` are stored."""
        row = self._connection.execute(
            "SELECT coalesce(sum(ok), 0), count(*), coalesce(max(metrics ->> 'saturated'), 0) FROM run"
            " JOIN target ON target.id = target_id AND target.name = ?"
            " JOIN host ON host.id = host_id AND hostname = ? AND host.fingerprint = ?"
            " JOIN build ON build.id = build_id AND engine = ? AND sha = ? AND build.fingerprint = ?"
            " JOIN model ON model.id = model_id AND model.name = ? AND config_hash = ?"
            " JOIN scenario ON scenario.id = scenario_id AND scenario.name = ? AND params_hash = ?",
            configuration.natural_key,
        ).fetchone()
        return SampleCount(row[0], row[1], bool(row[2]))

    def record(self, configuration: Configuration, sample: Sample) -> int:
        """Store a sample with its requests and readings in one transaction.

        Return the row id of the sample.
        """
        with self.transaction():
            return self._put(configuration, sample, f"live:{uuid.uuid4()}")[0]

    def import_sample(
        self, configuration: Configuration, sample: Sample, key: str, score: tuple[str, float] | None
    ) -> bool:
        """Store an imported sample and its score, if new. Call this within `transaction`.

        Args:
            configuration: benchmark configuration of the sample.
            key: unique key of the sample, by which repeated imports are detected.
            score: scorer and score, or None.

        Returns:
            True if the sample was stored, False if it was imported before.
        """
        run_id, added = self._put(configuration, sample, key)
        if added and score is not None:
            row = (run_id, *score, sample.started_ms)
            self._connection.execute("INSERT INTO score (run_id, scorer, score, at_ms) VALUES (?, ?, ?, ?)", row)
        return added

    def _put(self, configuration: Configuration, sample: Sample, key: str) -> tuple[int, bool]:
        connection = self._connection
        columns: dict[str, Any] = {
            "key": key,
            "target_id": self._target(configuration.target),
            "host_id": self._host(configuration.host, sample.started_ms),
            "build_id": self._build(configuration.build, sample.started_ms),
            "model_id": self._model(configuration.model, sample.started_ms),
            "scenario_id": self._scenario(configuration.scenario),
            "started_ms": sample.started_ms,
            "duration_s": sample.duration_s,
            "bench_version": __version__,
            "seed": sample.seed,
            "ok": int(sample.ok),
            "error": sample.error,
            "artifact": sample.artifact,
            **columns_of(sample),
        }
        run_id, added = _upsert(connection, "run", ("key",), columns)
        if added:
            if requests := list(request_rows(run_id, sample)):
                connection.executemany(_insert("request", requests[0]), requests)
            # OR IGNORE: if a target lists a device twice, drop the second reading. An error would lose the sample.
            if readings := [{"run_id": run_id, **asdict(reading)} for reading in sample.readings]:
                connection.executemany(_insert("telemetry", readings[0], "OR IGNORE"), readings)
        return run_id, added

    def score(self, run_id: int, score: float, scorer: str) -> None:
        """Set the score that `scorer` gives to the response of a sample.

        An earlier score of the same scorer is replaced.

        Raises:
            StoreError: no sample has the id `run_id`.
        """
        with self.transaction() as connection:
            if connection.execute("SELECT 1 FROM run WHERE id = ?", (run_id,)).fetchone() is None:
                raise StoreError(f"no run has the id {run_id}; `helexa-bench report --capability` shows the ids")
            connection.execute(
                "INSERT INTO score (run_id, scorer, score, at_ms) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (run_id, scorer) DO UPDATE SET score = excluded.score, at_ms = excluded.at_ms",
                (run_id, scorer, score, now_ms()),
            )

    def put_alert(self, alert: Mapping[str, Any]) -> int:
        """Insert an alert, or update the alert of the same configuration and metric.

        Args:
            alert: values by column of the table `alert`. `baseline_builds` is a list of row ids. An update does not
                change `raised_ms`.

        Returns:
            The row id of the alert.
        """
        columns = {**alert, "baseline_builds": json.dumps(alert["baseline_builds"])}
        key = (*ConfigurationIds._fields, "metric")
        changes = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in (*key, "raised_ms"))
        with self.transaction() as connection:
            return connection.execute(
                f"{_insert('alert', columns)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes} RETURNING id",
                columns,
            ).fetchone()[0]

    def _target(self, target: Target) -> int:
        return self._connection.execute(
            "INSERT INTO target (name, kind, endpoint, label) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE"
            " SET kind = excluded.kind, endpoint = excluded.endpoint, label = excluded.label RETURNING id",
            (target.name, target.kind, target.endpoint, target.label),
        ).fetchone()[0]

    def _host(self, host: Host, now: int) -> int:
        columns = asdict(host) | {"fingerprint": host.fingerprint, "first_seen_ms": now}
        columns["gpus"] = json.dumps(columns["gpus"])
        return _upsert(self._connection, "host", ("hostname", "fingerprint"), columns)[0]

    def _build(self, build: Build, now: int) -> int:
        columns = {
            "engine": build.engine,
            "sha": build.sha,
            "fingerprint": build.fingerprint,
            "sha_long": build.sha_long,
            "version": build.version,
            "dirty": build.dirty,
            "built_ms": build.built_ms,
            "facts": json.dumps(dict(build.facts)),
            "first_seen_ms": now,
        }
        return _upsert(self._connection, "build", ("engine", "sha", "fingerprint"), columns)[0]

    def _model(self, model: Model, now: int) -> int:
        config = json.dumps(dict(model.config))
        columns = {"name": model.name, "config_hash": model.config_hash, "config": config, "first_seen_ms": now}
        return _upsert(self._connection, "model", ("name", "config_hash"), columns)[0]

    def _scenario(self, scenario: ScenarioKey) -> int:
        columns = {
            "name": scenario.name,
            "params_hash": scenario.params_hash,
            "kind": scenario.kind,
            "params": json.dumps(dict(scenario.params)),
        }
        return _upsert(self._connection, "scenario", ("name", "params_hash"), columns)[0]


def now_ms() -> int:
    """Return the current time in UTC epoch milliseconds, for the database."""
    return time.time_ns() // 1_000_000


def _insert(table: str, columns: Mapping[str, Any], otherwise: str = "") -> str:
    names = ", ".join(columns)
    values = ", ".join(f":{name}" for name in columns)
    return f"INSERT {otherwise} INTO {table} ({names}) VALUES ({values})"


def _upsert(
    connection: sqlite3.Connection, table: str, key: tuple[str, ...], columns: Mapping[str, Any]
) -> tuple[int, bool]:
    """Insert a row if no row has the same key columns.

    Returns:
        The id of the new or existing row, and True if the row is new.
    """
    added = connection.execute(f"{_insert(table, columns)} ON CONFLICT DO NOTHING RETURNING id", columns).fetchone()
    if added is not None:
        return added[0], True
    where = " AND ".join(f"{name} = :{name}" for name in key)
    return connection.execute(f"SELECT id FROM {table} WHERE {where}", columns).fetchone()[0], False


_DAY_MS = 86_400_000


def prune(store: Store, days: int) -> int:
    """Delete requests and readings of samples older than `days` days.

    Returns:
        The number of deleted requests.
    """
    old = "run_id IN (SELECT id FROM run WHERE started_ms < ?)"
    before = (now_ms() - days * _DAY_MS,)
    with store.transaction() as connection:
        connection.execute(f"DELETE FROM telemetry WHERE {old}", before)
        return connection.execute(f"DELETE FROM request WHERE {old}", before).rowcount
