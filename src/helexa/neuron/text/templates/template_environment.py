"""Jinja as Hugging Face's chat templates expect it.

What a template may do is what `transformers` lets it do (utils/chat_template_utils.py): Jinja's sandbox without changes
to its data, trimmed blocks, `break` and `continue`, `{% generation %}`, JSON without escapes for HTML, the functions
`raise_exception(message)` and `strftime_now(format)`. An attribute that the sandbox withholds, such as `__class__`, is
undefined: it prints as nothing, and it can be neither called nor read from. The process in which templates run bounds
their time and memory.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2.meta
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_LENGTH = 16 << 20
"""Characters of a rendered text."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def undeclared(self, source: str) -> set[str]:
        """The variables that a template reads from its caller."""
        return jinja2.meta.find_undeclared_variables(self.parse(source))

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Run a template compiled here.

        Raises:
            Exception: jinja2's errors, and whatever else the template's operations raise.
        """
        length = 0
        pieces = []
        for piece in template.generate(variables):
            length += len(piece)
            if length > MAX_LENGTH:
                raise SecurityError(f"it writes more than {MAX_LENGTH} characters")
            pieces.append(piece)
        return "".join(pieces)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's own text, which only training asks for."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`, and nothing else that Python's own class would hand out."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace that takes no names of Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`, which is a name that a template may give
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
    """JSON for a prompt: unlike Jinja's own filter, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
