"""Registers and runs the checks of an outside program. A check is a function that raises an exception if it fails.

The outcome of each check is appended as a JSON line to the file named by the environment variable `OUTSIDE_RESULTS`.
"""

import asyncio
import inspect
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = os.environ["OUTSIDE_URL"]
MODEL = os.environ["OUTSIDE_TOOLS"]
CHAT_MODELS = {name: os.environ[f"OUTSIDE_{name.upper()}"] for name in ("tools", "chat")}
BASE_MODEL = os.environ["OUTSIDE_BASE"]
SETTINGS: dict[str, Any] = json.loads(os.environ["OUTSIDE_SETTINGS"])
CHECK_SECONDS = 300

_checks: list[Callable[[], Any]] = []


class Skipped(Exception):
    """A check raises this exception if it does not apply to the program or machine. The message is the reason."""


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a function as a check. The check's name is the function's name with spaces in place of underscores."""
    _checks.append(function)
    return function


def run() -> None:
    """Run all registered checks in the order of their registration, and report the outcome of each."""
    signal.signal(signal.SIGALRM, _too_long)
    for function in _checks:
        begun = time.monotonic()
        seconds = int(SETTINGS.get("check_secs", CHECK_SECONDS))
        signal.alarm(seconds)
        try:
            outcome = function()
            if inspect.isawaitable(outcome):
                asyncio.run(_awaited(outcome))
            report(function.__name__, "passed", seconds=time.monotonic() - begun)
        except Skipped as reason:
            report(function.__name__, "skipped", str(reason))
        except Exception as error:
            traceback.print_exc()
            report(function.__name__, "failed", _short(error), time.monotonic() - begun)
        finally:
            signal.alarm(0)


def report(name: str, outcome: str, reason: str = "", seconds: float = 0.0) -> None:
    """Append the outcome of a check as a JSON line to the results file (`OUTSIDE_RESULTS`)."""
    line = {"name": name.replace("_", " "), "outcome": outcome, "reason": reason, "seconds": round(seconds, 1)}
    with Path(os.environ["OUTSIDE_RESULTS"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def expect(error: type[Exception], function: Callable[[], Any]) -> Any:
    """Call `function` and return the exception of class `error` that it raises.

    Raises:
        AssertionError: `function` returns without an exception.
    """
    try:
        value = function()
    except error as raised:
        return raised
    raise AssertionError(f"expected {error.__name__}, got {value!r}")


def _short(error: Exception) -> str:
    if isinstance(error, AssertionError) and not str(error):
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"line {frame.lineno}: {frame.line}"
    return f"{type(error).__name__}: {error}"[:400]


async def _awaited(outcome: Any) -> None:
    await outcome


def _too_long(*_: object) -> None:
    raise TimeoutError("the check took too long")
