"""The server's side of the border to the processes in which chat templates run."""

import atexit
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, cast

from helexa.core.errors import HelexaError
from helexa.neuron.text.templates.template_frames import MAX_BYTES, OUT_OF_MEMORY, read_frame, write_frame

MAX_SECONDS = 5.0
"""Processor time of one rendering."""

MAX_SOURCE_LENGTH = 1 << 20
"""Characters of a template's source."""

_COMMAND = (sys.executable, "-m", "helexa.neuron.text.templates.template_process")
_PROCESSES = 4


class TemplateError(HelexaError):
    """A chat template is broken, or refuses these messages; the text carries its own words."""


class TemplateBoundsError(TemplateError):
    """A chat template needs more time or memory than it may have."""


class TemplateRenderer:
    """Runs templates in up to four processes, which are started when there is something to render.

    Safe to use from several threads. A process that a template has broken is replaced.
    """

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(_PROCESSES)
        self._idle: list[_Process] = []
        atexit.register(self.close)

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text that the template `source` makes of `variables`, which are JSON.

        Raises:
            TemplateError: when the template is broken or raises an error.
            TemplateBoundsError: when it takes too much time or memory.
        """
        return self._run(source, variables)

    def undeclared(self, source: str) -> frozenset[str]:
        """The variables that the template `source` reads from its caller.

        Raises:
            TemplateError: when the template is broken.
        """
        return frozenset(self._run(source, None).split())

    def close(self) -> None:
        """End the processes that have nothing to do."""
        while (process := self._pop()) is not None:
            process.close()

    def _run(self, source: str, variables: Mapping[str, Any] | None) -> str:
        if len(source) > MAX_SOURCE_LENGTH:
            raise TemplateError(f"the chat template is longer than {MAX_SOURCE_LENGTH} characters")
        request = json.dumps([source, variables, MAX_SECONDS], ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(request) > MAX_BYTES:
            raise TemplateBoundsError(f"the chat template is given more than {MAX_BYTES >> 20} MiB")
        with self._slots:
            process = self._process()
            reply = process.ask(request)
            if reply is None:
                raise TemplateBoundsError(f"the chat template failed: {process.close()}")
            self._idle.append(process)
        text = reply[1:].decode("utf-8", "surrogatepass")
        if reply[:1] != b"=":
            raise TemplateError(f"the chat template {text}")
        return text

    def _process(self) -> "_Process":
        while (process := self._pop()) is not None:
            if process.alive:
                return process
            process.close()
        return _Process()

    def _pop(self) -> "_Process | None":
        try:
            return self._idle.pop()
        except IndexError:
            return None


class _Process:
    """One process that renders; it ends when its standard input does."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C on the terminal reaches the server only.
        self._popen = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._stdin = cast(BinaryIO, self._popen.stdin)
        self._stdout = cast(BinaryIO, self._popen.stdout)

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, request: bytes) -> bytes | None:
        """The reply, or None if the process ended instead."""
        try:
            write_frame(self._stdin, request)
        except OSError:
            return None
        return read_frame(self._stdout) or None

    def close(self) -> str:
        """End the process; how it had ended, if it had."""
        self._stdout.close()
        with suppress(OSError):
            self._stdin.close()
        self._popen.kill()
        code = self._popen.wait()
        if code == -signal.SIGPROF:
            return "it runs for too long"
        return "it needs too much memory" if code == OUT_OF_MEMORY else f"its process ended with code {code}"
