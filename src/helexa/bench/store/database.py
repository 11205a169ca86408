"""Opens the SQLite database, creates its tables, and reads typed rows."""

import fcntl
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any, Self, TypeVar

from helexa.bench.store import sample_to_rows
from helexa.bench.store.row_types import (
    AlertRow,
    BuildRow,
    ConfigurationIds,
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
from helexa.core.errors import HelexaError

_BUSY_TIMEOUT_SECS = 10.0
SCHEMA_VERSION = 2

RowT = TypeVar("RowT")

_BOOLEANS = {"ok", "estimated", "dirty"}
_JSON = {"gpus", "facts", "config", "params", "baseline_builds"}
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
    **{name: f"run.{name} = ?" for name in ConfigurationIds._fields},
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


class StoreError(HelexaError):
    """The database cannot be opened, read or changed as requested."""


def open_writer(path: Path) -> sqlite3.Connection:
    """Open the database for writing. Create the file if it is missing.

    Raises:
        StoreError: the file cannot be opened, is not a database, or has another schema version.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_SECS, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        advice = f"check the permissions of {path.parent}, or set another bench.db_path"
        raise StoreError(f"cannot open the database {path}: {_reason(error)}; {advice}") from error
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a crash must not lose a sample, which may have taken minutes
        connection.execute("PRAGMA foreign_keys = ON")
        _create_tables(connection, path)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise StoreError(
                f"cannot open the database {path}: {error}; repair the file, or set another bench.db_path"
            ) from error
        raise
    connection.row_factory = sqlite3.Row
    return connection


@contextmanager
def measuring(path: Path) -> Iterator[None]:
    """Hold a lock, if the file system has locks, so that only one process measures.

    Raises:
        StoreError: another process holds the lock, or the lock file cannot be opened.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    except OSError as error:
        raise StoreError(
            f"cannot open the lock file {lock}: {error.strerror}; check the permissions of {lock.parent}"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(
                f"another helexa-bench is measuring into {path}; end it, or set another bench.db_path"
            ) from None
        except OSError:
            pass  # The file system has no locks, so measure without one.
        yield


def _open_reader(path: Path) -> sqlite3.Connection:
    """Open the database for reading. Another process may write to it at the same time.

    Only one thread at a time may use the connection.

    Raises:
        StoreError: the file is missing, is not a database, or has another schema version.
    """
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro",
            uri=True,
            timeout=_BUSY_TIMEOUT_SECS,
            isolation_level=None,
            check_same_thread=False,
        )
    except sqlite3.Error as error:
        raise StoreError(f"cannot open the database {path}: {error}; run `helexa-bench once` first") from error
    try:
        version = _version(connection)
    except sqlite3.Error as error:
        connection.close()
        raise StoreError(
            f"cannot read the database {path}: {error}; repair the file, or set another bench.db_path"
        ) from error
    if version != SCHEMA_VERSION:
        connection.close()
        raise _wrong_version(path, version)
    connection.row_factory = sqlite3.Row
    return connection


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("BEGIN IMMEDIATE")  # locks the database, so that only one of two processes creates the tables
    version = _version(connection)
    if not version:
        script = resources.files("helexa.bench.store").joinpath("schema.sql").read_text("utf-8")
        for statement in _statements(script):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")
    if version not in (0, SCHEMA_VERSION):
        raise _wrong_version(path, version)


def _version(connection: sqlite3.Connection) -> int:
    return connection.execute("PRAGMA user_version").fetchone()[0]


def _wrong_version(path: Path, version: int) -> StoreError:
    advice = "update this helexa" if version > SCHEMA_VERSION else "set bench.db_path to a new file"
    return StoreError(
        f"the database {path} has schema version {version}, but this helexa uses {SCHEMA_VERSION}; {advice}"
    )


def _statements(script: str) -> list[str]:
    """Return the statements of an SQL script."""
    # `executescript` is not used, because it would commit the open transaction.
    statements: list[str] = []
    lines: list[str] = []
    for line in script.splitlines():
        lines.append(line)
        if sqlite3.complete_statement(text := "\n".join(lines)):
            statements.append(text)
            lines = []
    return statements


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class Reader:
    """The database, opened for reading. Only one thread at a time may use a reader.

    Each row of the table `run` is one sample.
    """

    def __init__(self, path: Path) -> None:
        self._connection = _open_reader(path)

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
        """Return all scenarios.

        A scenario with several sets of parameters has several rows.
        """
        return self._rows(ScenarioRow, "SELECT * FROM scenario ORDER BY kind, name, id")

    def configurations(self) -> list[ConfigurationRow]:
        """Return all measured configurations, with sample counts and times."""
        return self._rows(ConfigurationRow, "SELECT * FROM cell_stats ORDER BY first_ms")

    def latest_configurations(self) -> list[ConfigurationRow]:
        """Return the newest configuration of each target, model and scenario name.

        A configuration with valid samples takes precedence over a newer one without.
        """
        return self._rows(ConfigurationRow, "SELECT * FROM latest_cell ORDER BY target_id, model_id, scenario_id")

    def run_count(self) -> int:
        """Return the number of all samples in the database."""
        return self._connection.execute("SELECT count(*) FROM run").fetchone()[0]

    def run(self, run_id: int) -> RunRow | None:
        """Return the sample with the id `run_id`, or None if there is none."""
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
        """Return the JSON data of a sample: distributions, totals and extra data."""
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
        row["chunks_s"] = sample_to_rows.unpack(row["chunks_s"])
    return row
