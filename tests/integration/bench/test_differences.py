"""Reports and pages distinguish builds, targets and settings that differ."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from helexa.bench import report
from helexa.bench.host_build_and_model import Build, Configuration, Gpu, Host, Model, ScenarioKey, Target
from helexa.bench.pages import charts, views
from helexa.bench.pages.page_routes_and_html_export import PAGES, html, query_string
from helexa.bench.request_records_and_metrics import Delta, RequestRecord, measure_run
from helexa.bench.results import capacity_and_scaling, series
from helexa.bench.results.archive import Archive
from helexa.bench.results.comparison import Side, compare
from helexa.bench.results.runs_and_scores import runs
from helexa.bench.store.row_types import Sample
from helexa.bench.store.writer import Store, now_ms

CONFIGURATION = Configuration(
    Target("a", "neuron", "http://a:13131"),
    Host("beast", driver_version="595", gpus=(Gpu("RTX 5090", 32607),)),
    Build("helexa", "abc1234", version="0.1.0"),
    Model("m", {"quant": "q8_0"}),
    ScenarioKey("single:cold:128", "single", {"max_tokens": 256}),
)
NEXT = Build("helexa", "def5678", version="0.1.1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "bench.sqlite") as store:
        yield store


@pytest.fixture
def archive(store: Store, tmp_path: Path) -> Iterator[Archive]:
    with Archive(tmp_path / "bench.sqlite") as archive:
        yield archive


def record_samples(store: Store, configuration: Configuration, tpot: float, **columns: float) -> None:
    for number in range(5):
        row = {"tpot_s": tpot * (1 + number / 1000), **columns}
        store.record(configuration, Sample(now_ms(), 0.0, 1.0, None, True, columns=row))


def page(archive: Archive, name: str, **query: object) -> str:
    parameters = dict.fromkeys((*PAGES[name].parameters, "id")) | query

    def link(name: str, **parameters: object) -> str:
        return f"/{name}{query_string(parameters)}"

    return html(archive, PAGES[name], parameters, link, lambda asset: asset)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"target": Target("b", "neuron", "http://b:13131")}, "target a → b"),
        ({"host": Host("beast", driver_version="600", gpus=CONFIGURATION.host.gpus)}, "driver 595 → 600"),
        ({"host": replace(CONFIGURATION.host, gpus=CONFIGURATION.host.gpus * 2)}, "device RTX 5090 → 2× RTX 5090"),
        ({"model": Model("m", {"quant": "q4_0"})}, "quant q8_0 → q4_0"),
        ({"scenario": ScenarioKey("single:cold:128", "single", {"max_tokens": 64})}, "max_tokens 256 → 64"),
    ],
)
def test_comparison_warns_if_more_than_the_build_differs(
    store: Store, archive: Archive, change: dict[str, object], text: str
) -> None:
    record_samples(store, CONFIGURATION, 0.1)
    record_samples(store, replace(CONFIGURATION, build=NEXT, **change), 0.2)
    sides = (Side("abc1234", "a"), Side("def5678", "b" if "target" in change else "a"))
    compared = compare(archive, *sides, metrics=("tpot_s",))
    assert [(row.state, row.differs) for row in compared] == [("regressed", [text])]
    assert f"A and B differ in more than the build: {text}" in report.comparison(compared)
    shown = page(archive, "compare", a=str(sides[0]), b=str(sides[1]), metric="tpot_s")
    assert f"A and B differ in more than the build: {text}" in shown


def test_comparison_has_no_warning_if_only_the_build_differs(store: Store, archive: Archive) -> None:
    record_samples(store, CONFIGURATION, 0.1)
    record_samples(store, replace(CONFIGURATION, build=NEXT), 0.2)
    compared = compare(archive, Side("abc1234"), Side("def5678"), metrics=("tpot_s",))
    assert [(row.state, row.differs) for row in compared] == [("regressed", [])]
    assert "differ" not in report.comparison(compared)


def test_trend_compares_no_builds_measured_with_different_parameters(store: Store, archive: Archive) -> None:
    record_samples(store, CONFIGURATION, 0.1)
    shorter = ScenarioKey("single:cold:128", "single", {"max_tokens": 64})
    record_samples(store, replace(CONFIGURATION, build=NEXT, scenario=shorter), 0.2)
    trend = series.series(archive, "a", "m", "single:cold:128", "tpot_s")
    assert [point.verdict.state for point in trend.points] == ["too few", "too few"]
    assert [(mark.kind, mark.text) for mark in trend.marks] == [("parameters", "max_tokens 256 → 64")]


def test_different_builds_of_one_commit_or_version_have_different_labels(store: Store, archive: Archive) -> None:
    builds = [
        CONFIGURATION.build,
        replace(CONFIGURATION.build, facts={"torch_version": "2.12"}),
        replace(CONFIGURATION.build, dirty=True),
        Build("vllm", "0.1.0", version="0.1.0"),
        Build("ollama", "0.1.0", version="0.1.0"),
    ]
    for number, build in enumerate(builds):
        record_samples(store, replace(CONFIGURATION, build=build), 0.1 + number / 10)
    labels = list(archive.tables.labels.values())
    assert len(set(labels)) == 5
    assert labels[2] == "abc1234+"
    assert [label.split("~")[0] for label in labels] == ["abc1234", "abc1234", "abc1234+", "0.1.0", "0.1.0"]
    (row,) = compare(archive, Side(labels[0]), Side(labels[1]), metrics=("tpot_s",))
    assert (row.a, row.b) == (pytest.approx(0.1, rel=0.01), pytest.approx(0.2, rel=0.01))
    shown = runs(archive, {"sha": labels[2]})
    assert [run.tpot_s for run in shown] == [pytest.approx(0.3, rel=0.01)] * 5


def test_overview_distinguishes_targets_with_equal_labels_and_hostnames(store: Store, archive: Archive) -> None:
    first, second = (Target(name, "neuron", f"http://{name}", "GPU box") for name in "ab")
    record_samples(store, replace(CONFIGURATION, target=first), 0.1)
    record_samples(
        store, replace(CONFIGURATION, target=second, host=replace(CONFIGURATION.host, driver_version="600")), 0.1
    )
    shown = views.overview(archive, {"target": None})["targets"]
    assert [(row["title"], row["host"].driver_version) for row in shown] == [
        ("GPU box (a)", "595"),
        ("GPU box (b)", "600"),
    ]


def test_overview_says_no_change_only_if_two_builds_were_compared(store: Store, archive: Archive) -> None:
    record_samples(store, CONFIGURATION, 0.1, output_tps_user=10.0)
    assert "= no change" not in page(archive, "overview")
    record_samples(store, replace(CONFIGURATION, build=NEXT), 0.1, output_tps_user=10.0)
    assert "= no change" in page(archive, "overview")


def test_capacity_report_has_no_knee_if_only_one_concurrency_level_was_measured(store: Store, archive: Archive) -> None:
    def level(users: int, ttft: float) -> None:
        scenario = ScenarioKey(f"concurrency:{users}", "concurrency", {"concurrency": users})
        record_samples(store, replace(CONFIGURATION, scenario=scenario), 0.1, concurrency=users, ttft_p95_s=ttft)

    level(1, 0.1)
    assert [(row.knee, row.knee_concurrency) for row in capacity_and_scaling.capacity(archive)] == [(None, None)]
    level(2, 0.15)
    level(4, 0.5)
    assert [(row.knee, row.knee_concurrency) for row in capacity_and_scaling.capacity(archive)] == [(2, 2)]


def test_context_chart_omits_axis_labels_that_would_overlap() -> None:
    def ladder(kind: str, *lengths: float) -> capacity_and_scaling.Scaling:
        points = [
            capacity_and_scaling.ScalingPoint("s", None, length, None, 1.0, 1.0, None, 5, False) for length in lengths
        ]
        return capacity_and_scaling.Scaling("a", "m", kind, "b", points, None)

    drawn = charts.ladders([ladder("cold", 130, 1030, 4102), ladder("warm", 146, 1046, 4118)], "decode_tps")
    assert drawn["x"]["values"] == [130, 146, 1030, 1046, 4102, 4118]
    assert drawn["x"]["ticks"] == [130, 1030, 4102]


def test_deliberately_cancelled_request_is_not_shown_as_failed(store: Store, archive: Archive) -> None:
    record = RequestRecord(0.0, 0.0, 1.0, "cancelled", deltas=[Delta(0.5, "text")])
    scenario = ScenarioKey("cancel", "cancel", {})
    sample = Sample(now_ms(), 0.0, 1.0, None, True, records=[record], measures=measure_run([record]))
    run_id = store.record(replace(CONFIGURATION, scenario=scenario), sample)
    shown = page(archive, "run", id=run_id)
    assert "cancelled</span>" in shown
    assert "✕" not in shown
    assert shown.count("failed-bar") == 1  # only in the legend
    assert "0 of 1, 1 cancelled" in page(archive, "runs", offset=0)
