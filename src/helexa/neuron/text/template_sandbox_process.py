"""Sandbox process that runs chat templates with limits on memory and CPU time.

`TemplateRenderer` starts the process. A chat template comes with the weights and is untrusted code. Jinja's sandbox
blocks attributes such as `__class__`: their value is Jinja's `Undefined` object, which prints as empty text and cannot
be called. The sandbox does not limit the memory of string methods or the time of comparisons, so the process has limits
(see `inside_sandbox`).

Unlike in `transformers`, a template may change lists and dicts, as llama.cpp's templates of Kimi K2 do. The changes
have no other effect, because all lists and dicts that a template can reach are created for one rendering.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2.meta
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from helexa.neuron.processes.inside_sandbox import cpu_time_limit, serve

MAX_MEMORY = 128 << 20  # maximum growth of the process's address space after its start, in bytes

_TEMPLATES = 8  # number of cached compiled templates

MAX_LENGTH = 16 << 20  # maximum number of characters in the rendered text


def main() -> None:
    """In the template process, answer render requests from standard input."""
    serve(_respond, MAX_MEMORY)


def _respond(request: bytes) -> bytes:
    """Return the response to a request: `=` and the text, or `!` and an error.

    For a request without variables, the text has the names of the template's undeclared variables.
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
        return f"!the chat template is broken in line {error.lineno}: {_one_line(error)}".encode("utf-8", "replace")
    except Exception as error:  # a template may raise any error of Python's operators
        return f"!the chat template failed: {_one_line(error)}".encode("utf-8", "replace")
    return b"=" + text.encode("utf-8", "surrogatepass")


@lru_cache(_TEMPLATES)
def _compiled(source: str) -> Template:
    return _environment.from_string(source)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


class TemplateEnvironment(SandboxedEnvironment):
    """Jinja environment with the features that Hugging Face's chat templates expect.

    The features match `transformers` (utils/chat_template_utils.py): trimmed blocks, `break` and `continue`,
    `{% generation %}`, JSON without HTML escapes, `raise_exception(message)` and `strftime_now(format)`.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def undeclared(self, source: str) -> set[str]:
        """Return the names of the variables that `source` uses but does not define."""
        return jinja2.meta.find_undeclared_variables(self.parse(source))

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render `template`, which this environment compiled, with `variables`.

        Raises:
            Exception: the template raises an error, which may have any type, or writes more than `MAX_LENGTH`.
        """
        length = 0
        chunks = []
        for chunk in template.generate(variables):
            length += len(chunk)
            if length > MAX_LENGTH:
                raise SecurityError(f"the prompt has more than {MAX_LENGTH} characters; shorten the messages")
            chunks.append(chunk)
        return "".join(chunks)


class _GenerationTag(Extension):
    """Renders the content of `{% generation %}...{% endgeneration %}` unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """Replacement for `dict` that supports only `dict(...)` and `dict.fromkeys(...)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's `namespace` object without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`, because a template may use this name
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"Chat templates cannot store underscore-prefixed attributes on a namespace, but got {name!r}. "
            "Please rename the attribute."
        )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's filter `tojson` would escape HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


_environment = TemplateEnvironment()

if __name__ == "__main__":
    main()
