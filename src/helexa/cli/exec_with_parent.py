"""Executes a program that gets SIGTERM when its parent process dies.

The module runs as a script: `exec_with_parent.py PARENT_PID PROGRAM ARGUMENTS...`. It starts in a few milliseconds.
Only Linux supports a signal at the parent's death. On other systems, the program runs without this signal.
"""

import ctypes
import os
import signal
import sys

# From <linux/prctl.h>; Python has no function for this call.
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request a SIGTERM at the parent's death, then execute the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        # The parent died before the signal was requested, so the signal would never arrive.
        sys.exit(f"the parent process {parent} has ended; {program[0]} was not started")
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
