"""Parent-death watch: child processes end with the server, even at SIGKILL.

The server gives each watched process a pipe as standard input and never writes to the pipe. The operating system closes
the pipe when the server exits. A thread of the watched process reads the pipe, and kills the process when the pipe is
closed.

The following commands run a third-party Python module or program under the watch:

    python -m helexa.neuron.processes.parent_watch MODULE ARGUMENTS...
    python -m helexa.neuron.processes.parent_watch /PATH/OF/PROGRAM ARGUMENTS...
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def start() -> None:
    """Kill this process, and the process group that it leads, when its stdin closes."""
    threading.Thread(target=_watch, name="parent-watch", daemon=True).start()


def _watch() -> None:
    with suppress(OSError):
        while os.read(0, 64):
            pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Watch the parent, and run the module or program of the command line."""
    start()
    del sys.argv[0]
    if sys.argv[0].startswith("/"):
        sys.exit(subprocess.call(sys.argv, stdin=subprocess.DEVNULL))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
