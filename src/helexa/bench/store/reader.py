"""Reads typed rows from the database. Another process may write to the database at the same time."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, TypeVar

from helexa.bench.store import chunks
from helexa.bench.store.database import open_reader
from helexa.bench.store.rows import (
    AlertRow,
    BuildRow,
    ConfigurationRow,
    HostRow,
    ModelRow,
    Reading,
    RequestRow,
    RunRow,
    ScenarioRow,
    ScoreRow,
    TargetRow,
)

RowT = TypeVar("RowT")

_BOOLEANS = {"ok", "estimated", "dirty"}
_JSON = {"gpus", "facts", "config", "params", "baseline_builds"}
_RUN_ID_COLUMNS = ("target_id", "host_id", "build_id", "model_id", "scenario_id")
_NAMES = {
    "target": "target.name",
    "target_kind": "target.kind",
    "hostname": "host.hostname",
    "engine": "build.engine",
    "sha": "build.sha",
    "build_version": "build.version",
    "model": "model.name",
    "scenario": "scenario.name",
    "scenario_kind": "scenario.kind",
}
_RUN_SELECT = ", ".join(
    f"{_NAMES[field.name]} AS {field.name}" if field.name in _NAMES else f"run.{field.name}" for field in fields(RunRow)
)
_RUN_FROM = (
    "run JOIN target ON target.id = target_id JOIN host ON host.id = host_id JOIN build ON build.id = build_id"
    " JOIN model ON model.id = model_id JOIN scenario ON scenario.id = scenario_id"
)
_RUN_FILTERS = {
    **{name: f"run.{name} = ?" for name in _RUN_ID_COLUMNS},
    "target": "target.name = ?",
    "host": "host.hostname = ?",
    "model": "model.name = ?",
    "scenario": "scenario.name = ?",
    "kind": "scenario.kind = ?",
    "sha": "build.sha = ?",
    "ok": "run.ok = ?",
    "since_ms": "run.started_ms >= ?",
    "before_ms": "run.started_ms < ?",
}


class Reader:
    """The database, opened for reading. Only one thread at a time may use it."""

    def __init__(self, path: Path) -> None:
        self._connection = open_reader(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    def builds(self) -> list[BuildRow]:
        """Return all builds, ordered by their first sample."""
        return self._rows(BuildRow, "SELECT * FROM build ORDER BY first_seen_ms, id")

    def hosts(self) -> list[HostRow]:
        """Return all hosts."""
        return self._rows(HostRow, "SELECT * FROM host ORDER BY hostname, id")

    def targets(self) -> list[TargetRow]:
        """Return all targets."""
        return self._rows(TargetRow, "SELECT * FROM target ORDER BY name")

    def models(self) -> list[ModelRow]:
        """Return all models. A model with several configurations has several rows."""
        return self._rows(ModelRow, "SELECT * FROM model ORDER BY name, first_seen_ms, id")

    def scenarios(self) -> list[ScenarioRow]:
        """Return all scenarios. A scenario with several sets of parameters has several rows."""
        return self._rows(ScenarioRow, "SELECT * FROM scenario ORDER BY kind, name, id")

    def configurations(self) -> list[ConfigurationRow]:
        """Return all measured benchmark configurations, each with sample counts and timestamps."""
        return self._rows(ConfigurationRow, "SELECT * FROM cell_stats ORDER BY first_ms")

    def latest_configurations(self) -> list[ConfigurationRow]:
        """Return the most recently measured benchmark configuration of each target, model name and scenario name."""
        return self._rows(ConfigurationRow, "SELECT * FROM latest_cell ORDER BY target_id, model_id, scenario_id")

    def run_count(self) -> int:
        """Return the number of stored samples."""
        return self._connection.execute("SELECT count(*) FROM run").fetchone()[0]

    def run(self, run_id: int) -> RunRow | None:
        """Return the sample with this id, or None if no sample has the id."""
        rows = self._rows(RunRow, f"SELECT {_RUN_SELECT} FROM {_RUN_FROM} WHERE run.id = ?", (run_id,))
        return rows[0] if rows else None

    def runs(self, *, limit: int = 500, offset: int = 0, **filters: Any) -> list[RunRow]:
        """Return samples that match the filters, newest first.

        Args:
            limit: maximum number of samples.
            offset: number of samples to skip.
            filters: required values. `target`, `host`, `model`, `scenario`, `kind` and `sha` are texts. `target_id`,
                `host_id`, `build_id`, `model_id` and `scenario_id` are row ids. `ok` selects valid or invalid samples.
                `since_ms` and `before_ms` select a period. None matches every value.
        """
        where, values = _where(filters)
        sql = f"SELECT {_RUN_SELECT} FROM {_RUN_FROM}{where} ORDER BY started_ms DESC, run.id DESC LIMIT ? OFFSET ?"
        return self._rows(RunRow, sql, (*values, limit, offset))

    def metrics(self, run_id: int) -> dict[str, Any]:
        """Return the JSON data of a sample: summary statistics and totals by metric, and extra data."""
        row = self._connection.execute("SELECT metrics FROM run WHERE id = ?", (run_id,)).fetchone()
        return json.loads(row[0]) if row else {}

    def artifact(self, run_id: int) -> str | None:
        """Return the response text that is stored with a sample, or None."""
        row = self._connection.execute("SELECT artifact FROM run WHERE id = ?", (run_id,)).fetchone()
        return row[0] if row else None

    def requests(self, run_id: int) -> list[RequestRow]:
        """Return the requests of a sample, in the order in which they were stored."""
        columns = ", ".join(
            "chunks AS chunks_s" if field.name == "chunks_s" else field.name for field in fields(RequestRow)
        )
        return self._rows(RequestRow, f"SELECT {columns} FROM request WHERE run_id = ? ORDER BY number", (run_id,))

    def telemetry(self, run_id: int) -> list[Reading]:
        """Return the accelerator readings of a sample, ordered by time and device."""
        columns = ", ".join(field.name for field in fields(Reading))
        return self._rows(Reading, f"SELECT {columns} FROM telemetry WHERE run_id = ? ORDER BY at_s, device", (run_id,))

    def scores(self, run_id: int) -> list[ScoreRow]:
        """Return the scores that scorers have set for a sample, newest first."""
        return self._rows(ScoreRow, "SELECT * FROM score WHERE run_id = ? ORDER BY at_ms DESC", (run_id,))

    def alerts(self, limit: int = 500) -> list[AlertRow]:
        """Return the newest `limit` alerts, newest first."""
        return self._rows(AlertRow, "SELECT * FROM alert ORDER BY raised_ms DESC, id DESC LIMIT ?", (limit,))

    def select(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Execute an SQL query with the parameters `values` and return its rows."""
        return self._connection.execute(sql, values).fetchall()

    def _rows(self, kind: type[RowT], sql: str, values: Sequence[Any] = ()) -> list[RowT]:
        cursor = self._connection.execute(sql, values)
        names = [column[0] for column in cursor.description]
        return [kind(**_plain(dict(zip(names, row, strict=True)))) for row in cursor]


def _where(filters: Mapping[str, Any]) -> tuple[str, list[Any]]:
    given = {name: value for name, value in filters.items() if value is not None}
    clauses = [_RUN_FILTERS[name] for name in given]
    return (f" WHERE {' AND '.join(clauses)}" if clauses else ""), list(given.values())


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    for name in _BOOLEANS & row.keys():
        row[name] = None if row[name] is None else bool(row[name])
    for name in _JSON & row.keys():
        row[name] = json.loads(row[name])
    if "chunks_s" in row:
        row["chunks_s"] = chunks.unpack(row["chunks_s"])
    return row
