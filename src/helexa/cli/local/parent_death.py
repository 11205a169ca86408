"""Becomes another program, one that the system ends when the process that started it dies, however it dies.

Run as a script, `guard.py PARENT_PID PROGRAM ARGUMENTS...`, so that it starts in a few milliseconds. Only Linux can tie
a life to a parent's; elsewhere the program is started all the same.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent is already gone")  # it died before it could be noticed
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
