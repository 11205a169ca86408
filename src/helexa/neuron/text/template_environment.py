"""The sandbox in which a model's chat template runs.

A template comes with the weights: it is a stranger's program. It runs without access to Python's internals, and with
bounds on how long it computes and on the size of what it adds, multiplies, joins and writes.
"""

import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0
"""Processor time of one rendering."""

MAX_LENGTH = 16 << 20
"""Characters of the result, and length of any text or list that `+`, `*` or `~` puts together on the way.

What one string method or format width makes (`ljust`, `'%900d'`, `replace`) is not counted.
"""

_MAX_NUMBER = 1 << 63

# Not a name that a template could write, so no template can reset its own deadline.
_DEADLINE = "deadline of this rendering"


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face's templates expect it.

    Blocks are trimmed, `break` and `continue` work, `{% generation %}` marks nothing, `tojson` writes plain JSON,
    and templates may call `raise_exception(message)` and `strftime_now(format)`.
    """

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def render(self, template: Template, variables: Mapping[str, Any], seconds: float | None = None) -> str:
        """Run a template compiled here, for at most `seconds` of processor time (`MAX_SECONDS` if None).

        Raises:
            Exception: jinja2's errors, and whatever else the template's operations raise.
        """
        deadline = time.thread_time() + (MAX_SECONDS if seconds is None else seconds)
        length = 0
        pieces = []
        for piece in template.generate({**variables, _DEADLINE: deadline}):
            length += len(piece)
            if length > MAX_LENGTH:
                raise SecurityError(f"it writes more than {MAX_LENGTH} characters")
            pieces.append(piece)
        return "".join(pieces)

    def check_time(self, context: Context) -> bool:
        """True, until the rendering has used up its time."""
        if time.thread_time() > context[_DEADLINE]:
            raise SecurityError("it runs for too long")
        return True

    def check_length(self, text: str) -> str:
        """The text, unless it is too long."""
        if len(text) > MAX_LENGTH:
            raise SecurityError(f"it builds more than {MAX_LENGTH} characters")
        return text

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`, unless the result would be too large."""
        sizes = [_size(left), _size(right)]
        if operator == "**":
            raise SecurityError("it computes a power")
        if operator == "+":
            too_large = sum(sizes) > MAX_LENGTH
        else:
            any_text = not (isinstance(left, int | float) and isinstance(right, int | float))
            too_large = sizes[0] * sizes[1] > (MAX_LENGTH if any_text else _MAX_NUMBER)
        if too_large:
            raise SecurityError(f"the result of a '{operator}' is too large")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))


class _Bounds(NodeTransformer):
    """Puts the checks into a template: time in every turn of a loop and call of a macro, length in every join."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_check_time(node), node.test, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_check_time(node), lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_check_time(node), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(node, "check_length", node)


def _check_time(place: nodes.Node) -> nodes.Expr:
    return _call(place, "check_time", nodes.ContextReference(lineno=place.lineno))


def _call(place: nodes.Node, method: str, argument: nodes.Expr) -> nodes.Expr:
    function = nodes.EnvironmentAttribute(method, lineno=place.lineno)
    return nodes.Call(function, [argument], [], None, None, lineno=place.lineno)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's own text, which only training asks for."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _size(value: Any) -> float:
    if isinstance(value, str | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int | float) else 0


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
