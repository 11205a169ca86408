"""Secrets in the command line of a process."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from helexa.core.command_line import hide_argument
hide_argument("a-secret-key"), hide_argument("x"), hide_argument("")
print(repr(Path("/proc/self/cmdline").read_bytes().split(b"\\0")[-5:]), repr(sys.argv[1:]))
"""


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="the system has no /proc")
def test_api_key_argument_is_hidden_from_the_process_list_but_not_from_the_program() -> None:
    arguments = ["--api-key", "a-secret-key", "--key=a-secret-key", "é x"]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, check=True, text=True)
    shown = [b"--api-key", b"x" * 12, b"--key=" + b"x" * 12, "é x".encode(), b""]
    assert done.stdout.strip() == f"{shown!r} {arguments!r}"
