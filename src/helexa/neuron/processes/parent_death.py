"""A lifeline: what the server starts ends with the server, however that ends and whatever it is doing just then.

Standard input is a pipe whose other end the server holds and never writes to; the system closes it when the server is
gone, and a thread waits for that.

    python -m helexa.neuron.processes.parent_death MODULE ARGUMENTS...
    python -m helexa.neuron.processes.parent_death /PATH/OF/PROGRAM ARGUMENTS...

runs a module or a program of somebody else's so.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def hold() -> None:
    """From now on this process, and all that it starts, is killed as soon as standard input ends.

    To be called by a process that was started in a session of its own.
    """
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def _watch() -> None:
    with suppress(OSError):
        while os.read(0, 64):
            pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Hold on, then be the module or run the program that is named."""
    hold()
    del sys.argv[0]
    if sys.argv[0].startswith("/"):
        sys.exit(subprocess.call(sys.argv, stdin=subprocess.DEVNULL))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
