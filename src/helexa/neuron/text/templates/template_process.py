"""Sandbox process that runs chat templates with limits on memory and CPU time. `TemplateRenderer` starts the process.

A chat template comes with the weights and is untrusted code. Jinja's sandbox does not limit the memory of string
methods or the time of comparisons, but the limits of the sandbox process do (see `sandboxed`).
"""

import json
from functools import lru_cache

from jinja2 import Template, TemplateSyntaxError

from helexa.neuron.processes.sandboxed import cpu_time_limit, serve
from helexa.neuron.text.templates.template_environment import TemplateEnvironment

MAX_MEMORY = 128 << 20
"""Maximum growth of the process's address space after its start, in bytes."""

_TEMPLATES = 8  # number of cached compiled templates

_environment = TemplateEnvironment()


def main() -> None:
    """Answer render requests from standard input, until standard input is closed."""
    serve(_respond, MAX_MEMORY)


def _respond(request: bytes) -> bytes:
    """Return the response to one request: `=` followed by the rendered text, or `!` followed by an error message.

    If the request has no variables, the response contains the names of the template's undeclared variables instead of
    rendered text.
    """
    source, variables, seconds = json.loads(request.decode("utf-8", "surrogatepass"))
    del request
    try:
        with cpu_time_limit(seconds):
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
    return b"=" + text.encode("utf-8", "surrogatepass")


@lru_cache(_TEMPLATES)
def _compiled(source: str) -> Template:
    return _environment.from_string(source)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


if __name__ == "__main__":
    main()
