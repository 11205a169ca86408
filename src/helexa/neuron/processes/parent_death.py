"""Parent-death watch: processes that the server has started are killed when the server exits or crashes.

The server gives each watched process a pipe as standard input and never writes to the pipe. The operating system closes
the pipe when the server exits. A thread of the watched process reads the pipe, and kills the process when the pipe is
closed.

The following commands run a third-party Python module or program under the watch:

    python -m helexa.neuron.processes.parent_death MODULE ARGUMENTS...
    python -m helexa.neuron.processes.parent_death /PATH/OF/PROGRAM ARGUMENTS...
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def hold() -> None:
    """Start the parent-death watch: kill this process and its children when standard input is closed.

    The children are killed only if this process leads its own process group.
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
    """Start the parent-death watch, then run the module or program that the command line names."""
    hold()
    del sys.argv[0]
    if sys.argv[0].startswith("/"):
        sys.exit(subprocess.call(sys.argv, stdin=subprocess.DEVNULL))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
