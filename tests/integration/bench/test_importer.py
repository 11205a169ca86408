"""Import of the `runs` table of the first helexa-bench, in its first and its last version."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from helexa.bench.store.database import Reader, StoreError
from helexa.bench.store.importer import ImportReport, import_runs
from helexa.bench.store.writer import Store

FIRST: dict[str, Any] = {
    "ts": "2026-06-13T10:00:00Z",
    "target_name": "beast",
    "target_kind": "neuron",
    "endpoint": "http://beast:13131",
    "hostname": "beast",
    "driver_version": "595.58",
    "cuda_version": "13.0",
    "gpus_json": '[{"name": "NVIDIA GeForce RTX 5090", "vram_total_mb": 32607}]',
    "git_sha": "abc1234",
    "git_sha_long": "abc1234" + "0" * 33,
    "package_version": "0.1.16",
    "git_dirty": 0,
    "build_timestamp": "2026-06-13T09:00:00Z",
    "features_json": '["cuda"]',
    "model_id": "org/model",
    "harness": "candle",
    "devices_json": "[0, 1]",
    "scenario_id": "chat:128",
    "prompt_size_approx": 128,
    "prompt_tokens_actual": 140,
    "max_tokens": 256,
    "ttft_s": 0.25,
    "decode_tps": 40.0,
    "total_s": 6.65,
    "completion_tokens": 256,
    "prefill_ms": 200,
    "decode_ms": 6400,
    "prefill_tokens": 140,
    "vram_used_mb": 28000,
    "ok": 1,
    "error": None,
}
LATER = {"concurrency": 4, "ttft_p95_s": 0.5, "queue_wait_ms": 12.5, "rejected": 1, "quality_score": 0.8}


def old_database(path: Path, *rows: dict[str, Any]) -> Path:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"CREATE TABLE runs (id INTEGER PRIMARY KEY, {', '.join(columns)})")
        for row in rows:
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO runs ({', '.join(row)}) VALUES ({marks})", list(row.values()))
        connection.commit()
    return path


def import_file(tmp_path: Path, source: Path) -> tuple[ImportReport, Path]:
    database = tmp_path / "bench.sqlite"
    with Store(database) as store:
        return import_runs(store, source), database


def test_row_of_a_database_in_the_old_format_is_imported_as_a_run(tmp_path: Path) -> None:
    report, database = import_file(tmp_path, old_database(tmp_path / "old.sqlite", FIRST))
    assert report == ImportReport(added=1)
    with Reader(database) as reader:
        (run,) = reader.runs()
        assert (run.target, run.hostname, run.sha, run.model) == ("beast", "beast", "abc1234", "org/model")
        assert (run.scenario, run.scenario_kind, run.ok) == ("chat:128", "single", True)
        assert (run.started_ms, run.ttft_s, run.e2e_s) == (1781344800000, 0.25, 6.65)
        assert (run.output_tps_user, run.tpot_s) == (40.0, 0.025)
        assert (run.prefill_tps, run.prefill_s, run.decode_s) == (700.0, 0.2, 6.4)
        assert (run.prompt_tokens, run.completion_tokens, run.vram_used_mb) == (140, 256, 28000)
        (host,) = reader.hosts()
        assert (host.driver_version, host.gpus[0]["name"]) == ("595.58", "NVIDIA GeForce RTX 5090")
        (build,) = reader.builds()
        assert (build.version, build.dirty, build.facts) == ("0.1.16", False, {"features": ["cuda"]})
        assert reader.models()[0].config == {"harness": "candle", "devices": [0, 1]}


def test_second_import_of_the_same_file_adds_no_runs(tmp_path: Path) -> None:
    source = old_database(tmp_path / "old.sqlite", FIRST, FIRST | {"ts": "2026-06-13T11:00:00Z"})
    assert import_file(tmp_path, source)[0] == ImportReport(added=2)
    report, database = import_file(tmp_path, source)
    assert report == ImportReport(known=2)
    with Reader(database) as reader:
        assert reader.run_count() == 2


def test_old_format_databases_with_added_or_unknown_columns_are_imported(tmp_path: Path) -> None:
    rows = FIRST, FIRST | LATER | {"scenario_id": "concurrency:4", "invented_since": "x"}
    _, database = import_file(tmp_path, old_database(tmp_path / "old.sqlite", *rows))
    with Reader(database) as reader:
        (run,) = reader.runs(kind="concurrency")
        assert (run.concurrency, run.ttft_p95_s, run.queue_s, run.rejected) == (4, 0.5, 0.0125, 1)
        assert reader.metrics(run.id)["imported"] == {"invented_since": "x"}
        assert [(score.scorer, score.score) for score in reader.scores(run.id)] == [("manual", 0.8)]


def test_failed_runs_are_imported_and_unreadable_rows_are_only_counted(tmp_path: Path) -> None:
    rows = (
        FIRST | {"ok": 0, "error": "HTTP 500"},
        FIRST | {"ts": "yesterday"},
        FIRST | {"target_name": None},
        FIRST | {"ttft_s": "fast"},
        FIRST | {"target_kind": "toaster"},
        FIRST | {"gpus_json": "{", "git_sha": None},
    )
    report, database = import_file(tmp_path, old_database(tmp_path / "old.sqlite", *rows))
    assert report == ImportReport(added=2, unreadable=4)
    with Reader(database) as reader:
        assert [run.error for run in reader.runs(ok=False)] == ["HTTP 500"]


def test_import_of_a_file_that_is_not_an_old_format_database_fails(tmp_path: Path) -> None:
    empty = tmp_path / "empty.sqlite"
    sqlite3.connect(empty).close()
    with pytest.raises(StoreError, match="is not there"):
        import_file(tmp_path, empty)
    with pytest.raises(StoreError, match="lacks the columns git_sha"):
        import_file(
            tmp_path,
            old_database(tmp_path / "other.sqlite", {name: FIRST[name] for name in FIRST if name != "git_sha"}),
        )
    with pytest.raises(StoreError, match="cannot read"):
        import_file(tmp_path, tmp_path / "missing.sqlite")
