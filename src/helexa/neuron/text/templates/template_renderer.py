"""Start the processes that run chat templates, and send render requests to them."""

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
"""Maximum CPU time for rendering one prompt, in seconds."""

MAX_SOURCE_LENGTH = 1 << 20
"""Maximum number of characters in the source of a template."""

_COMMAND = (sys.executable, "-m", "helexa.neuron.text.templates.template_process")
_PROCESSES = 4


class TemplateError(HelexaError):
    """A chat template is broken or rejects the messages.

    The error message includes the text of the template's error.
    """


class TemplateBoundsError(TemplateError):
    """A chat template exceeded its time, memory or size limit."""


class TemplateRenderer:
    """Pool of up to four template processes, which are started when they are needed.

    The pool is thread-safe. If a process has ended, the pool starts a new one.
    """

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(_PROCESSES)
        self._idle: list[_Process] = []
        atexit.register(self.close)

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Render the template `source` with `variables`, which are JSON values, and return the text.

        Raises:
            TemplateError: the template is broken or raises an error.
            TemplateBoundsError: the template exceeds its time, memory or size limit.
        """
        return self._run(source, variables)

    def undeclared(self, source: str) -> frozenset[str]:
        """Return the names of the variables that the template `source` uses but does not define itself.

        Raises:
            TemplateError: the template is broken.
        """
        return frozenset(self._run(source, None).split())

    def close(self) -> None:
        """End all idle template processes. A process that is rendering a template continues."""
        while (process := self._pop()) is not None:
            process.close()

    def _run(self, source: str, variables: Mapping[str, Any] | None) -> str:
        if len(source) > MAX_SOURCE_LENGTH:
            raise TemplateError(f"the chat template is longer than {MAX_SOURCE_LENGTH} characters")
        request = json.dumps([source, variables, MAX_SECONDS], ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(request) > MAX_BYTES:
            raise TemplateBoundsError(f"the chat template and its variables take more than {MAX_BYTES >> 20} MiB")
        with self._slots:
            process = self._process()
            response = process.request(request)
            if response is None:
                raise TemplateBoundsError(f"the chat template failed: {process.close()}")
            self._idle.append(process)
        text = response[1:].decode("utf-8", "surrogatepass")
        if response[:1] != b"=":
            raise TemplateError(f"the chat template {text}")
        return text

    def _process(self) -> "_Process":
        while (process := self._pop()) is not None:
            if process.is_running:
                return process
            process.close()
        return _Process()

    def _pop(self) -> "_Process | None":
        try:
            return self._idle.pop()
        except IndexError:
            return None


class _Process:
    """A running template process. The process ends when its standard input is closed."""

    def __init__(self) -> None:
        # In its own process group, the process does not receive Ctrl-C from the terminal.
        self._popen = subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._stdin = cast(BinaryIO, self._popen.stdin)
        self._stdout = cast(BinaryIO, self._popen.stdout)

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def request(self, frame: bytes) -> bytes | None:
        """Send the request `frame` to the process and return its response. Return None if the process ended."""
        try:
            write_frame(self._stdin, frame)
        except OSError:
            return None
        return read_frame(self._stdout) or None

    def close(self) -> str:
        """End the process, and return the reason for its end as text.

        The reason is the limit that the process exceeded, or its exit code.
        """
        self._stdout.close()
        with suppress(OSError):
            self._stdin.close()
        self._popen.kill()
        code = self._popen.wait()
        if code == -signal.SIGPROF:
            return "it runs for too long"
        return "it needs too much memory" if code == OUT_OF_MEMORY else f"its process ended with code {code}"
