"""Process that runs chat templates with limits on memory and CPU time. `TemplateRenderer` starts the process.

A chat template comes with the weights and is untrusted code. Jinja's sandbox does not limit the memory of string
methods or the time of comparisons. The operating system enforces the limits on this process, so an expensive template
ends this process and not the server.
"""

import json
import os
import resource
import signal
import sys
from functools import lru_cache
from pathlib import Path

from jinja2 import Template, TemplateSyntaxError

from helexa.neuron.text.templates.template_environment import TemplateEnvironment
from helexa.neuron.text.templates.template_frames import OUT_OF_MEMORY, read_frame, write_frame

MAX_MEMORY = 128 << 20
"""Maximum growth of the process's address space after its start, in bytes."""

_TEMPLATES = 8  # number of cached compiled templates

_environment = TemplateEnvironment()


def main() -> None:
    """Read requests from standard input and write responses to standard output, until standard input is closed."""
    _limit_memory()
    try:
        while (request := read_frame(sys.stdin.buffer)) is not None:
            write_frame(sys.stdout.buffer, _respond(request))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # skip cleanup, which could need memory


def _limit_memory() -> None:
    if sys.platform == "linux":  # other systems do not enforce a limit on address space
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MAX_MEMORY, used_bytes + MAX_MEMORY))


def _respond(request: bytes) -> bytes:
    """Return the response to one request: `=` followed by the rendered text, or `!` followed by an error message.

    If the request has no variables, the response contains the names of the template's undeclared variables instead of
    rendered text.
    """
    source, variables, seconds = json.loads(request.decode("utf-8", "surrogatepass"))
    del request
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process during any operation
    try:
        if variables is None:
            text = " ".join(_environment.undeclared(source))
        else:
            text = _environment.render(_compiled(source), variables)
    except MemoryError:
        raise
    except TemplateSyntaxError as error:
        return f"!is broken in line {error.lineno}: {_one_line(error)}".encode("utf-8", "replace")
    except Exception as error:  # a template may raise any error of Python's operators
        return f"!failed: {_one_line(error)}".encode("utf-8", "replace")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return b"=" + text.encode("utf-8", "surrogatepass")


@lru_cache(_TEMPLATES)
def _compiled(source: str) -> Template:
    return _environment.from_string(source)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


if __name__ == "__main__":
    main()
