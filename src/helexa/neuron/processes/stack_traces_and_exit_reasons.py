"""Stack traces of hung engines, and reasons why a process ended.

`PYTHON_SIGNAL` requests the stacks of Python functions. `NATIVE_SIGNAL` requests the stacks of native functions, for
example of the thread pool of the CPU kernels. Only the library of the CPU kernels writes native stacks, so a process
without this library ignores `NATIVE_SIGNAL`.
"""

import faulthandler
import signal
from collections.abc import Callable

PYTHON_SIGNAL = signal.SIGUSR1
NATIVE_SIGNAL = signal.SIGUSR2

_CAUSES = {
    signal.SIGKILL: "out of memory?",
    signal.SIGBUS: "was a file of the model or of its packed weights truncated while it was read?",
}


class _Process:
    """Whether `register` was called in this process."""

    registered = False


def register() -> None:
    """Install the handlers of the server's signals. An engine calls this at its start."""
    _Process.registered = True
    faulthandler.register(PYTHON_SIGNAL)
    signal.signal(NATIVE_SIGNAL, signal.SIG_IGN)


def use_native(dump_stacks_on: Callable[[int], object]) -> None:
    """Let a native library handle `NATIVE_SIGNAL`, if `register` was called before."""
    if _Process.registered:
        dump_stacks_on(NATIVE_SIGNAL)


def exit_reason(code: int | None) -> str:
    """Return how a process ended, e.g. `was ended by SIGKILL (out of memory?)`.

    `code` is the return code of `subprocess.Popen`: negative if a signal ended the process, None if unknown.
    """
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:  # a real-time signal
        return f"was ended by signal {-code}"
    return f"was ended by {number.name}" + (f" ({_CAUSES[number]})" if number in _CAUSES else "")
