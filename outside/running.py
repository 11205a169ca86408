"""Runs the checks of one program in a separate process and collects their outcomes."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

from programs import FOLDER, Program
from results import FAILED, PASSED, SKIPPED, Check, Result

from npm import NODE, NODE_PATH
from packages import CACHE

_PROJECT = FOLDER.parent


def run_script(program: Program, environment: Path, context: Mapping[str, str], logs: Path) -> Result:
    """Run the script that checks a program, and return the outcomes of its checks.

    The script appends one JSON line for each check to the file that the environment variable `OUTSIDE_RESULTS` names.

    Args:
        program: the program.
        environment: path of the program's environment, from `environments.prepare`.
        context: environment variables for the script, for example `OUTSIDE_URL` and the ids of the models.
        logs: folder for the script's output.
    """
    script = FOLDER / program.script
    if script.suffix == ".mjs":  # Node looks up packages from the script's folder
        for file in script.parent.glob("*.mjs"):
            shutil.copy(file, environment)
        command = [str(NODE), str(environment / script.name)]
    else:
        is_client = program.registry == "pypi" and program.python == "program"
        python = environment / "bin" / "python" if is_client else sys.executable
        command = [str(python), str(script)]
    with tempfile.TemporaryDirectory(prefix="outside-") as home:
        lines = Path(home) / "results.jsonl"
        lines.touch()
        environ = {
            "PATH": NODE_PATH,
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "OUTSIDE_RESULTS": str(lines),
            "OUTSIDE_ENVIRONMENT": str(environment),
            "OUTSIDE_SETTINGS": json.dumps(program.settings),
            "OUTSIDE_LOGS": str(logs),
            **context,
        }
        if program.registry == "project":  # other programs write only to their home folder
            environ["XDG_CACHE_HOME"] = str(CACHE.parents[1])
        problem = _run(command, environ, home, program.timeout_secs, logs / f"{program.name}.log")
        checks = [Check(**json.loads(line)) for line in lines.read_text().splitlines()]
    if problem is None and not checks:
        problem = "the script reported no check"
    if problem:
        checks.append(Check("script", FAILED, problem))
    return Result(program, tuple(checks))


def run_tests(program: Program, logs: Path) -> Result:
    """Run helexa's test files for a program with pytest, and return the outcomes. Each test counts as one check."""
    report = logs / f"{program.name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junit-xml={report}"]
    log = logs / f"{program.name}.log"
    problem = _run([*command, *program.script.split()], os.environ, str(_PROJECT), program.timeout_secs, log)
    if not report.exists():
        return Result(program, (Check("script", FAILED, problem or "pytest wrote no report"),))
    return Result(program, tuple(read_junit(report)))


def read_junit(report: Path) -> list[Check]:
    """Return the outcome of each test in the JUnit XML file `report`."""
    checks = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        seconds = float(case.get("time", "0"))
        outcome, reason = PASSED, ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, reason = FAILED, child.get("message", "")
            elif child.tag == "skipped":
                outcome, reason = SKIPPED, child.get("message", "")
        checks.append(Check(case.get("name", ""), outcome, reason, round(seconds, 1)))
    return checks


def _run(command: list[str], environ: Mapping[str, str], folder: str, timeout_secs: float, log: Path) -> str | None:
    """Run a command in a new process session, with its output in the file `log`. Return why it failed, or None."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=environ,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    problem = None
    try:
        if status := process.wait(timeout_secs):
            problem = f"ended with {status}: {log.read_text(errors='replace')[-400:].strip()}"
    except subprocess.TimeoutExpired:
        problem = f"ran longer than {timeout_secs:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # remaining child processes
        process.wait()
    return problem
