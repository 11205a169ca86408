"""Runs checks. A check is a function that raises on failure. Its outcome is written as a JSON line."""

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
    """Raised by a check that cannot run here. The message is the reason."""


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a function as a check. The name of the check is the function's name with spaces for underscores."""
    _checks.append(function)
    return function


def run() -> None:
    """Run all registered checks in the order of their registration."""
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
    """Append the outcome of a check to the results file."""
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
