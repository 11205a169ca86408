"""A terminal with a person at it: the command runs on a pseudo-terminal of its own, keys go in, text comes out."""

import os
import pty
import select
import subprocess
import sys
import time

# The command must own the terminal for Ctrl-C to become a signal, and not have inherited that it is to ignore it.
_OWN = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)

CTRL_C = "\x03"
CTRL_D = "\x04"


class Screen:
    """Runs `helexa ARGUMENTS`, or another module's command, until it is left."""

    def __init__(self, arguments, environ, module="helexa"):
        self.text = ""
        self._seen = 0
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", _OWN, sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True
        )
        os.close(slave)

    def type(self, text):
        """Press keys; a line ends with "\\n"."""
        os.write(self._master, text.encode())

    def expect(self, text, seconds=60):
        """Read until `text` is shown after what was expected before."""
        assert self._look_for(text, seconds), f"{text!r} was not shown in {self.text[self._seen :]!r}"

    def insist(self, key, text):
        """Press `key` until `text` is shown: a line editor can miss a signal that comes as it shows its prompt."""
        for _ in range(60):
            self.type(key)
            if self._look_for(text, 1):
                return
        raise AssertionError(f"{text!r} was not shown in {self.text[self._seen :]!r}")

    def leave(self, seconds=60):
        """Read to the end; returns the exit code."""
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
        while (found := self.text.find(text, self._seen)) < 0:
            if not self._read(deadline - time.monotonic()):
                return False
        self._seen = found + len(text)
        return True

    def _read(self, seconds):
        if not select.select([self._master], [], [], max(seconds, 0))[0]:
            return False
        try:
            data = os.read(self._master, 4096)
        except OSError:
            return False  # the command has left
        self.text += data.decode(errors="replace")
        return bool(data)
