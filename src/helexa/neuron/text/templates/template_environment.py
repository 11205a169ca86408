"""Jinja environment with the features that Hugging Face's chat templates expect.

The features match `transformers` (utils/chat_template_utils.py): Jinja's immutable sandbox, trimmed blocks, `break` and
`continue`, `{% generation %}`, JSON without HTML escapes, and the functions `raise_exception(message)` and
`strftime_now(format)`. The sandbox blocks attributes such as `__class__`: their value is Jinja's `Undefined` object,
which prints as empty text and cannot be called. `template_process` limits the time and memory of templates.
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
"""Maximum number of characters in the rendered text."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja environment that compiles and runs chat templates in a sandbox."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def undeclared(self, source: str) -> set[str]:
        """Return the names of the variables that the template `source` uses but does not define itself."""
        return jinja2.meta.find_undeclared_variables(self.parse(source))

    def render(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Render `template`, which this environment compiled, with `variables` and return the text.

        Raises:
            Exception: the template raises an error, or the text is longer than `MAX_LENGTH`. Operations in a template
                can raise any type of exception.
        """
        length = 0
        chunks = []
        for chunk in template.generate(variables):
            length += len(chunk)
            if length > MAX_LENGTH:
                raise SecurityError(f"it writes more than {MAX_LENGTH} characters")
            chunks.append(chunk)
        return "".join(chunks)


class _GenerationTag(Extension):
    """Jinja extension for the tag `{% generation %}...{% endgeneration %}`, whose content is rendered unchanged.

    Templates mark the assistant's text with this tag for training.
    """

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """Replacement for Python's `dict` in templates, which supports only `dict(...)` and `dict.fromkeys(...)`."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's `namespace` object without support for names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`, since a template may use this name
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
    """Return `value` as JSON. Unlike Jinja's `tojson` filter, this filter does not escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)
