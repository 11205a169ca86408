"""The store: a real database file with a second, reading connection."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from helexa.bench.host_build_and_model import Build, Configuration, Gpu, Host, Model, ScenarioKey, Target
from helexa.bench.request_records_and_metrics import Delta, Objectives, RequestRecord, measure_run
from helexa.bench.store.database import SCHEMA_VERSION, Reader, StoreError, measuring, open_writer
from helexa.bench.store.row_types import Reading, Sample
from helexa.bench.store.writer import Store, now_ms, prune

CONFIGURATION = Configuration(
    Target("node", "neuron", "http://node:13131"),
    Host("beast", cpu="c", driver_version="595", gpus=(Gpu("RTX 5090", 32607), Gpu("RTX 5090", 32607))),
    Build("helexa", "abc1234", facts={"torch_version": "2.11"}),
    Model("org/model", {"quant": "q6k"}),
    ScenarioKey("single:cold:128", "single", {"prompt_tokens": 128}),
)


def sample(ttft: float = 0.5, *, started_ms: int | None = None, ok: bool = True, start: float = 100.0) -> Sample:
    chunks = [Delta(start + ttft + 0.1 * number, "text") for number in range(5)]
    record = RequestRecord(start, start, start + 2, "ok", deltas=chunks, prompt_tokens=130, completion_tokens=5)
    readings = [Reading(0.5, 0, 1000, 50.0, 60.0), Reading(0.5, 1, 2000, 70.0, 55.0)]
    return Sample(
        started_ms=now_ms() if started_ms is None else started_ms,
        start=start,
        duration_s=2.0,
        seed=7,
        ok=ok,
        error=None if ok else "error: broken",
        records=[record],
        measures=measure_run([record], Objectives(ttft_s=1.0)),
        readings=readings,
        columns={"concurrency": 1},
        extra={"salt": "s"},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "bench.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with Store(path) as store:
        yield store


def test_stored_sample_is_read_back_unchanged(store: Store, path: Path) -> None:
    run_id = store.record(CONFIGURATION, sample())
    with Reader(path) as reader:
        (run,) = reader.runs(target="node", host="beast", model="org/model", scenario="single:cold:128", ok=True)
        assert run == reader.run(run_id)
        assert (run.sha, run.engine, run.ttft_s, run.concurrency) == ("abc1234", "helexa", 0.5, 1)
        assert (run.tpot_s, run.output_tps_user) == (pytest.approx(0.1), pytest.approx(10))
        assert (run.prompt_tokens, run.completion_tokens, run.goodput_share) == (130, 5, 1.0)
        assert (run.vram_used_mb, run.gpu_util_pct, run.gpu_temp_c) == (3000, 70.0, 60.0)
        (request,) = reader.requests(run_id)
        assert request.chunks_s == pytest.approx((0.5, 0.6, 0.7, 0.8, 0.9))
        assert (request.sent_s, request.ended_s, request.status) == (0.0, 2.0, "ok")
        assert len(reader.telemetry(run_id)) == 2
        assert reader.metrics(run_id)["distributions"]["ttft_s"]["n"] == 1
        assert [build.facts for build in reader.builds()] == [{"torch_version": "2.11"}]
        assert [gpu["name"] for gpu in reader.hosts()[0].gpus] == ["RTX 5090"] * 2
        assert [(model.name, model.config) for model in reader.models()] == [("org/model", {"quant": "q6k"})]
        assert reader.runs(ok=False) == []


@pytest.mark.parametrize(
    "change",
    [
        {"build": Build("helexa", "abc1234", facts={"torch_version": "2.12"})},
        {"build": Build("helexa", "abc1234", facts={"torch_version": "2.11"}, dirty=True)},
        {"host": Host("beast", cpu="c", driver_version="600", gpus=CONFIGURATION.host.gpus)},
        {"model": Model("org/model", {"quant": "q4k"})},
        {"scenario": ScenarioKey("single:cold:128", "single", {"prompt_tokens": 129})},
        {"target": Target("other", "neuron", "http://node:13131")},
    ],
)
def test_changed_setting_that_affects_speed_makes_a_new_configuration(
    store: Store, path: Path, change: dict[str, object]
) -> None:
    changed = Configuration(
        **({name: getattr(CONFIGURATION, name) for name in Configuration.__dataclass_fields__} | change)
    )  # type: ignore[arg-type]
    store.record(CONFIGURATION, sample())
    assert (store.count(CONFIGURATION).good, store.count(changed).good) == (1, 0)
    store.record(changed, sample())
    assert (store.count(CONFIGURATION).good, store.count(changed).good) == (1, 1)
    with Reader(path) as reader:
        assert [configuration.samples for configuration in reader.configurations()] == [1, 1]


def test_change_of_build_time_url_or_kernel_makes_no_new_configuration(store: Store) -> None:
    rebuilt = Build("helexa", "abc1234", facts={"torch_version": "2.11"}, built_ms=5)
    booted = Host("beast", kernel="7.0", cpu="c", driver_version="595", gpus=CONFIGURATION.host.gpus)
    moved = Target("node", "neuron", "http://elsewhere:13131")
    store.record(CONFIGURATION, sample())
    assert store.count(Configuration(moved, booted, rebuilt, CONFIGURATION.model, CONFIGURATION.scenario)).good == 1


def test_failed_samples_are_stored_and_counted_as_failures(store: Store, path: Path) -> None:
    store.record(CONFIGURATION, sample(ok=False))
    assert store.count(CONFIGURATION)[:2] == (0, 1)
    with Reader(path) as reader:
        assert [(configuration.samples, configuration.failures) for configuration in reader.configurations()] == [
            (0, 1)
        ]


def test_latest_configurations_contain_only_the_build_that_was_measured_last(store: Store, path: Path) -> None:
    old = Configuration(
        CONFIGURATION.target, CONFIGURATION.host, Build("helexa", "old"), CONFIGURATION.model, CONFIGURATION.scenario
    )
    store.record(old, sample(started_ms=2_000))
    store.record(CONFIGURATION, sample(started_ms=3_000))
    with Reader(path) as reader:
        (latest,) = reader.latest_configurations()
        assert {build.id: build.sha for build in reader.builds()}[latest.build_id] == "abc1234"


def test_reader_of_the_bench_database_sees_committed_runs_and_cannot_write(store: Store, path: Path) -> None:
    with Reader(path) as reader:
        assert reader.run_count() == 0
        store.record(CONFIGURATION, sample())
        assert reader.run_count() == 1
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.select("DELETE FROM run")


def test_sample_that_cannot_be_written_completely_leaves_no_rows(store: Store, path: Path) -> None:
    broken = sample()
    broken.columns = {"no_such_column": 1}
    with pytest.raises(sqlite3.OperationalError):
        store.record(CONFIGURATION, broken)
    with Reader(path) as reader:
        assert (reader.run_count(), reader.builds()) == (0, [])


def test_pruning_removes_requests_and_telemetry_of_old_runs_but_not_the_runs(store: Store, path: Path) -> None:
    old = store.record(CONFIGURATION, sample(ttft=0.25, started_ms=now_ms() - 91 * 86_400_000))
    new = store.record(CONFIGURATION, sample())
    assert prune(store, 90) == 1
    with Reader(path) as reader:
        assert (reader.requests(old), reader.telemetry(old)) == ([], [])
        assert len(reader.requests(new)) == 1
        assert reader.run_count() == 2


def test_second_score_by_the_same_scorer_replaces_the_first(store: Store, path: Path) -> None:
    run_id = store.record(CONFIGURATION, sample())
    store.score(run_id, 0.5, "anna")
    store.score(run_id, 0.75, "anna")
    with pytest.raises(StoreError, match="no run has the id 99"):
        store.score(99, 1.0, "anna")
    with Reader(path) as reader:
        assert [(score.scorer, score.score) for score in reader.scores(run_id)] == [("anna", 0.75)]


def test_opening_a_missing_or_foreign_database_fails_with_a_clear_error(path: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="run `helexa-bench once` first"):
        Reader(tmp_path / "missing.sqlite")
    text = tmp_path / "text.sqlite"
    text.write_text("this is no database at all, " * 100)
    for opened in (Store, Reader):
        with pytest.raises(StoreError, match=r"text\.sqlite"):
            opened(text)
    open_writer(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    for opened in (Store, Reader):
        with pytest.raises(StoreError, match="schema"):
            opened(path)


def test_second_process_that_measures_into_the_same_database_is_rejected(path: Path) -> None:
    with measuring(path), pytest.raises(StoreError, match="another helexa-bench"), measuring(path):
        pass
    with measuring(path):
        pass
