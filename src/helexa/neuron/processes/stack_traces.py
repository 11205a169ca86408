"""Stack traces of this process's threads on standard error, which the server requests from a hung engine by signals.

One signal requests the stacks of Python functions, the other one the stacks of native functions, for example of the
thread pool of the CPU kernels. The library of the CPU kernels writes native stacks, so a process without this library
ignores the second signal.
"""

import faulthandler
import signal
from collections.abc import Callable

PYTHON_SIGNAL = signal.SIGUSR1
NATIVE_SIGNAL = signal.SIGUSR2


class _Process:
    """Whether `register` was called in this process."""

    registered = False


def register() -> None:
    """Write stack traces when the server requests them. An engine process calls this function when it starts."""
    _Process.registered = True
    faulthandler.register(PYTHON_SIGNAL)
    signal.signal(NATIVE_SIGNAL, signal.SIG_IGN)


def use_native(dump_stacks_on: Callable[[int], object]) -> None:
    """Use a native library for the stacks of native functions. Do nothing before `register`.

    Args:
        dump_stacks_on: function of the library that installs a handler for the signal with the given number.
    """
    if _Process.registered:
        dump_stacks_on(NATIVE_SIGNAL)
