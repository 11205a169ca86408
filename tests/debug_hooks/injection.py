"""Environment variables with which tests inject faults into engine processes, and make them write plan logs."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

FAULTS = "TEST_ENGINE_FAULTS"
"""The environment variable that lists faults; see `debug_fault`."""

PLAN_LOG = "TEST_ENGINE_PLAN_LOG"
"""The environment variable that names a folder for plan logs; see `plan_log.recorded_scheduler`."""

_FOLDER = Path(__file__).parent


def hooks(faults: str | None = None, plan_log: Path | None = None) -> dict[str, str]:
    """Return the environment variables of a process whose engines have faults or write plan logs."""
    path = os.pathsep.join(dict.fromkeys([str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]))
    variables = {"PYTHONPATH": path}
    if faults is not None:
        variables[FAULTS] = faults
    if plan_log is not None:
        variables[PLAN_LOG] = str(plan_log)
    return variables


def inject(monkeypatch: "pytest.MonkeyPatch", faults: str, plan_log: Path | None = None) -> None:
    """Inject faults into the engines that a test starts, and make them write plan logs to `plan_log`."""
    for name, value in hooks(faults, plan_log).items():
        monkeypatch.setenv(name, value)
