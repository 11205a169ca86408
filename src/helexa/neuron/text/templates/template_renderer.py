"""Send render requests to the sandbox processes that run chat templates."""

import json
from collections.abc import Mapping
from typing import Any

from helexa.core.errors import HelexaError
from helexa.neuron.processes.frames import MAX_BYTES
from helexa.neuron.processes.sandbox import Sandbox, SandboxError

MAX_SECONDS = 5.0
"""Maximum CPU time for rendering one prompt, in seconds."""

MAX_SOURCE_LENGTH = 1 << 20
"""Maximum number of characters in the source of a template."""

_MODULE = "helexa.neuron.text.templates.template_process"
_PROCESSES = 4


class TemplateError(HelexaError):
    """A chat template is broken or rejects the messages.

    The error message includes the text of the template's error.
    """


class TemplateBoundsError(TemplateError):
    """A chat template exceeded its time, memory or size limit."""


class TemplateRenderer:
    """Renders templates in up to four sandbox processes, which are started when they are needed. Thread-safe."""

    def __init__(self) -> None:
        self._sandbox = Sandbox(_MODULE, _PROCESSES)

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
        self._sandbox.close()

    def _run(self, source: str, variables: Mapping[str, Any] | None) -> str:
        if len(source) > MAX_SOURCE_LENGTH:
            raise TemplateError(f"the chat template is longer than {MAX_SOURCE_LENGTH} characters")
        request = json.dumps([source, variables, MAX_SECONDS], ensure_ascii=False).encode("utf-8", "surrogatepass")
        if len(request) > MAX_BYTES:
            raise TemplateBoundsError(f"the chat template and its variables take more than {MAX_BYTES >> 20} MiB")
        try:
            response = self._sandbox.request(request)
        except SandboxError as error:
            raise TemplateBoundsError(f"the chat template failed: {error}") from error
        text = response[1:].decode("utf-8", "surrogatepass")
        if response[:1] != b"=":
            raise TemplateError(f"the chat template {text}")
        return text
