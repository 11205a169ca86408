"""Executes a program that ends when its parent process dies, because the operating system then sends it SIGTERM.

The module runs as a script: `parent_death.py PARENT_PID PROGRAM ARGUMENTS...`. The script starts in a few milliseconds.
Only Linux supports a signal at the parent's death. On other systems, the program runs without this signal.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request a SIGTERM for the time when the parent process dies, then execute the program in this process."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent is already gone")  # the parent died before the request
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
