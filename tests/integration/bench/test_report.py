"""The commands of `helexa bench` that print reports."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from helexa.bench.alerts import EXIT_REGRESSED
from helexa.bench.report import comparison
from helexa.bench.results.comparison import MetricComparison


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "helexa.bench", *arguments], capture_output=True, check=False, text=True
    )


def tables(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("kind", ["", "--scaling", "--swap", "--capability", "--concurrency"])
def test_each_report_is_printed_as_a_table_or_as_json(past, kind):
    arguments = ["report", *([kind] if kind else []), "--db", str(past)]
    written = run_bench(*arguments)
    assert written.returncode == 0, written.stderr
    head, rule, *rows = tables(written.stdout)
    assert {len(row) for row in rows} == {len(head)}
    assert all(set(cell) <= {"-", ":"} for cell in rule)
    results = json.loads(run_bench(*arguments, "--format", "json").stdout)
    assert len(rows) == sum(len(row["points"]) if "points" in row else 1 for row in results)


def test_exit_code_of_the_compare_command_reports_the_verdict(past):
    slower = run_bench("compare", "@beast", "@closet", "--metric", "tpot_s", "--db", str(past))
    assert slower.returncode == EXIT_REGRESSED
    assert "regressed" in slower.stdout
    faster = run_bench("compare", "@closet", "@beast", "--metric", "tpot_s", "--db", str(past), "--format", "json")
    assert faster.returncode == 0
    assert {row["state"] for row in json.loads(faster.stdout)} <= {"improved", "too few"}


def test_report_says_how_many_samples_a_verdict_needs_if_there_are_too_few():
    compared = MetricComparison("", "m", "s", "tpot_s", "s", "lower", 0.1, 0.2, 2, 2, None, "too few")
    assert "a verdict needs 5 samples of each side" in comparison([compared])
    assert "a verdict needs" not in comparison([replace(compared, state="same")])


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["compare", "nosuch", "@beast"], 1, "no build is called 'nosuch'"),
        (["compare", "@beast", "@closet", "--metric", "speed"], 1, "no metric is called 'speed'"),
        (["serve", "--listen", "nowhere"], 2, "is not an address"),
    ],
)
def test_usage_errors_of_reports_are_one_line(past, arguments, code, message):
    failed = run_bench(*arguments, "--db", str(past))
    assert failed.returncode == code
    assert message in failed.stderr
    assert failed.stderr.count("\n") == 1
