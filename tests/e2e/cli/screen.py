"""A simulated terminal: runs the command on a pseudo-terminal, sends keys and reads the output."""

import os
import pty
import select
import subprocess
import sys
import time

# For Ctrl-C to become SIGINT, the command must own the terminal and must not inherit an ignored SIGINT.
_WITH_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)

CTRL_C = "\x03"
CTRL_D = "\x04"


class Screen:
    """Runs `python -m MODULE ARGUMENTS` on a pseudo-terminal.

    `expect` and `press_until` look only at output after the previous match.
    """

    def __init__(self, arguments, environ, module="helexa"):
        self.text = ""
        self._position = 0
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", _WITH_TERMINAL, sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True
        )
        os.close(slave)

    def type(self, text):
        """Send keys. Enter is "\\n"."""
        os.write(self._master, text.encode())

    def expect(self, text, seconds=60):
        """Read output until `text` appears; fail after `seconds` seconds."""
        assert self._look_for(text, seconds), f"{text!r} was not shown in {self.text[self._position :]!r}"

    def press_until(self, key, text):
        """Press `key` once a second until `text` appears.

        A line editor can miss a signal that arrives before the prompt is complete.
        """
        for _ in range(60):
            self.type(key)
            if self._look_for(text, 1):
                return
        raise AssertionError(f"{text!r} was not shown in {self.text[self._position :]!r}")

    def wait_for_exit(self, seconds=60):
        """Read all output and return the exit code."""
        while self._read(seconds):
            pass
        return self._process.wait(seconds)

    def close(self):
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._master)

    def _look_for(self, text, seconds):
        deadline = time.monotonic() + seconds
        while (start := self.text.find(text, self._position)) < 0:
            if not self._read(deadline - time.monotonic()):
                return False
        self._position = start + len(text)
        return True

    def _read(self, seconds):
        if not select.select([self._master], [], [], max(seconds, 0))[0]:
            return False
        try:
            data = os.read(self._master, 4096)
        except OSError:
            return False  # the command has ended
        self.text += data.decode(errors="replace")
        return bool(data)
