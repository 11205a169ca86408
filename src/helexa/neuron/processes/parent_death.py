"""Parent-death watch: processes started by the server are killed when the server exits or crashes.

Standard input of a watched process is a pipe whose other end the server holds and never writes to. The operating system
closes the pipe when the server exits. A thread of the watched process waits for the end of the pipe and then kills the
process.

    python -m helexa.neuron.processes.parent_death MODULE ARGUMENTS... python -m helexa.neuron.processes.parent_death
    /PATH/OF/PROGRAM ARGUMENTS...

These commands run a third-party module or program under the watch.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def hold() -> None:
    """Start the parent-death watch: this process and its children are killed when standard input ends.

    This process must lead its own process group.
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
    """Start the watch, then run the named module or program."""
    hold()
    del sys.argv[0]
    if sys.argv[0].startswith("/"):
        sys.exit(subprocess.call(sys.argv, stdin=subprocess.DEVNULL))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
