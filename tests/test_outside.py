"""The runner of `make outside`: its table, JSON and exit status. These tests run no outside program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_OUTSIDE = Path(__file__).parents[1] / "outside"


@pytest.fixture(autouse=True)
def scripts_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the folder of the runner's modules on the import path."""
    monkeypatch.syspath_prepend(_OUTSIDE)


def program(name="openai", **options):
    from programs import Program

    return Program(name, "sdk", "pypi", "checks/openai_checks.py", "1.0", **options)


def result(*checks, name="openai"):
    from results import Check, Result

    return Result(program(name), tuple(Check(*check) for check in checks))


def known(check, cause="the model is too small", name="openai"):
    from programs import KnownFailure

    return KnownFailure(name, check, cause)


def judged(*checks, listed=()):
    from results import judge

    return judge([result(*checks)], listed)


def test_exit_status_is_0_if_every_check_passes_or_is_skipped():
    assert judged(("plain", "passed"), ("streamed", "skipped", "no browser")).exit_status == 0


def test_exit_status_is_1_for_a_failure_that_is_not_listed_as_known():
    verdict = judged(("plain", "failed", "no answer"), listed=[known("streamed")])
    assert verdict.exit_status == 1
    assert [(name, check.reason) for name, check in verdict.unexpected] == [("openai", "no answer")]


def test_exit_status_is_0_for_a_known_failure_and_its_cause_is_printed():
    verdict = judged(("plain", "failed"), listed=[known("plain")])
    assert verdict.exit_status == 0
    assert [cause for _, _, cause in verdict.known] == ["the model is too small"]


def test_exit_status_is_1_if_a_check_listed_as_a_known_failure_passes():
    verdict = judged(("plain", "passed"), listed=[known("plain")])
    assert verdict.exit_status == 1
    assert [entry.check for entry in verdict.mended] == ["plain"]


def test_known_failure_listed_for_all_checks_counts_as_fixed_only_if_all_checks_pass():
    some = judged(("plain", "passed"), ("streamed", "failed"), listed=[known("*")])
    assert some.exit_status == 0
    assert judged(("plain", "passed"), ("streamed", "passed"), listed=[known("*")]).mended


def test_known_failure_of_a_program_that_was_not_run_does_not_fail_the_run():
    assert judged(("plain", "passed"), listed=[known("plain", name="codex")]).exit_status == 0


def test_result_table_counts_outcomes_and_gives_reasons_of_skips():
    from results import table

    text = table([result(("plain", "passed"), ("streamed", "failed", "a|b"), ("forced", "skipped", "no tools"))])
    assert text.splitlines() == [
        "| Program | Version | Passed | Failed | Skipped |",
        "| --- | --- | --- | --- | --- |",
        "| openai | 1.0 | 1 | 1 | 1 (no tools) |",
    ]


def test_result_of_a_partial_run_replaces_only_the_programs_that_ran():
    from results import merged, to_json

    old = to_json([result(("plain", "failed")), result(("plain", "passed"), name="codex")], {"date": "2026-01-01"})
    new = to_json([result(("plain", "passed"))], {"date": "2026-01-02"})
    combined = json.loads(merged(old, new, ["codex", "openai"]))
    outcomes = [(entry["name"], entry["checks"][0]["outcome"]) for entry in combined["programs"]]
    assert outcomes == [("codex", "passed"), ("openai", "passed")]
    assert combined["date"] == "2026-01-02"


def test_documented_table_names_the_causes_of_known_failures():
    from results import client_table, to_json

    text = to_json([result(("plain", "passed"), ("forced", "failed", "a long trace"))], {})
    (row,) = client_table(text, [known("forced")]).splitlines()[2:]
    assert row == "| openai | 1.0 | sdk | 1 of 2 | forced: the model is too small |"


def test_documented_table_of_client_programs_matches_the_recorded_result():
    import clients_table

    page = clients_table.PAGE.read_text()
    assert clients_table.with_table(page, clients_table.RESULT.read_text()) == page, "run outside/clients_table.py"


def test_each_pinned_client_program_has_a_version_and_an_existing_script():
    import programs

    for entry in programs.load().programs:
        scripts = [programs.FOLDER / entry.script]
        if entry.registry == "tests":
            scripts = [programs.FOLDER.parent / path for path in entry.script.split()]
        else:
            assert entry.version and all("==" in package or "@" in package[1:] for package in entry.packages), (
                entry.name
            )
        assert all(script.exists() for script in scripts), entry.name


def test_known_failure_of_an_unknown_program_is_rejected(tmp_path):
    import programs

    (tmp_path / "programs.toml").write_text(
        '[model]\n[[program]]\nname = "a"\npart = "sdk"\nregistry = "pypi"\nscript = "a.py"\n'
        '[[known_failure]]\nprogram = "b"\ncheck = "plain"\ncause = "none"\n'
    )
    with pytest.raises(ValueError, match="unknown program: b"):
        programs.load(tmp_path / "programs.toml")


@pytest.mark.parametrize(
    ("script", "outcome", "reason"),
    [
        ("report('plain text', 'passed')", "passed", ""),
        ("pass", "failed", "the script reported no check"),
        ("raise SystemExit('no wheel')", "failed", "no wheel"),
        ("import time; time.sleep(60)", "failed", "ran longer than 2 s"),
    ],
)
def test_client_program_script_yields_its_checks_or_one_failed_check(tmp_path, script, outcome, reason):
    import running
    from programs import FOLDER

    (tmp_path / "logs").mkdir()
    file = tmp_path / "checks.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(FOLDER / 'checks')!r})\nfrom checking import report\n{script}\n"
    )
    (tmp_path / "environment/bin").mkdir(parents=True)
    (tmp_path / "environment/bin/python").symlink_to(sys.executable)
    entry = program(timeout_secs=2.0)
    context = {"OUTSIDE_URL": "", "OUTSIDE_TOOLS": "", "OUTSIDE_CHAT": "", "OUTSIDE_BASE": ""}
    object.__setattr__(entry, "script", str(file))
    (check,) = running.run_script(entry, tmp_path / "environment", context, tmp_path / "logs").checks
    assert check.outcome == outcome and reason in check.reason


def test_check_script_of_a_python_project_runs_with_the_projects_python(tmp_path):
    import running
    from programs import FOLDER

    (tmp_path / "logs").mkdir()
    file = tmp_path / "checks.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(FOLDER / 'checks')!r})\nfrom checking import report\n"
        "report(sys.executable, 'passed')\n"
    )
    context = {"OUTSIDE_URL": "", "OUTSIDE_TOOLS": "", "OUTSIDE_CHAT": "", "OUTSIDE_BASE": ""}
    entry = program(python="project")
    object.__setattr__(entry, "script", str(file))
    (check,) = running.run_script(entry, tmp_path / "environment", context, tmp_path / "logs").checks
    assert (check.name, check.outcome) == (sys.executable.replace("_", " "), "passed")


def test_pytest_results_become_checks_of_the_client_program(tmp_path):
    import running

    file = tmp_path / "test_sample.py"
    file.write_text(
        "import pytest\ndef test_a():\n    pass\ndef test_b():\n    assert 0, 'broken'\n"
        "def test_c():\n    pytest.skip('no browser')\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", str(file)]
    subprocess.run(command, cwd=tmp_path, stdout=subprocess.DEVNULL, check=False)
    checks = {check.name: (check.outcome, check.reason) for check in running.read_junit(report)}
    assert checks["test_a"] == ("passed", "")
    assert checks["test_b"][0] == "failed" and "broken" in checks["test_b"][1]
    assert checks["test_c"] == ("skipped", "no browser")
