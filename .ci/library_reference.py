#!/usr/bin/env python3
"""Write docs/library-reference.md from the docstrings of `import helexa`. A test checks that the page is current."""

import ast
import dataclasses
import inspect
import re
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any, get_overloads

import helexa
from helexa.generation import model, options, public_functions, request, target, tools

PAGE = Path(__file__).parents[1] / "docs" / "library-reference.md"

_HEAD = """\
# Library reference

<!-- Generated from the docstrings by .ci/library_reference.py: change the docstrings, and run the script again. -->

This page lists all functions and classes of `import helexa`. [The Python library](library.md) explains them with
examples.
"""
_OPTIONS = ("Options", "AskOptions", "BatchOptions", "BatchTargetOptions", "EmbedOptions")
_INTERNAL = {"GenerationError.at", "Model.results"}
_TYPES = {
    request: ("Message", "Prompt", "Image"),
    tools: ("Tool",),
    model: ("OnToken",),
    options: ("OnResult",),
    target: ("OnProgress",),
}
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$", re.MULTILINE)
_ENTRY = re.compile(r"^([\w, ]+): (.*)")
_TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Raises": "Errors", "Returns": "Result"}


def reference() -> str:
    """Return the text of the page."""
    members = {name: getattr(helexa, name) for name in helexa.__all__}
    functions = {name: value for name, value in members.items() if inspect.isfunction(value)}
    errors = {
        name: value for name, value in members.items() if isinstance(value, type) and issubclass(value, Exception)
    }
    classes = {name: value for name, value in members.items() if name not in functions and name not in errors}
    options = {name: getattr(public_functions, name, None) or getattr(model, name) for name in _OPTIONS}
    parts = [_HEAD, "## Functions\n", *(_function(f"helexa.{name}", value, 3) for name, value in functions.items())]
    parts += ["## Options\n", *(_class(name, value) for name, value in options.items())]
    parts += ["## Classes\n", *(_class(name, value) for name, value in classes.items())]
    parts += ["## Types\n", _types()]
    parts += ["## Errors\n", *(_class(name, value) for name, value in errors.items())]
    return "\n".join(parts)


def _class(name: str, value: type) -> str:
    parents = [f"`{base.__name__}`" for base in value.__bases__ if base not in (object, Exception, dict)]
    above = f"A subclass of {' and '.join(parents)}.\n\n" if parents and issubclass(value, Exception) else ""
    text = f"### {name}\n\n{above}{_text(value)}"
    shown = [
        (key, member)
        for key, member in vars(value).items()
        if not key.startswith("_") and f"{name}.{key}" not in _INTERNAL
        if inspect.isfunction(member) or isinstance(member, property)
    ]
    for key, member in shown:
        if isinstance(member, property):
            text += f"\n#### {name}.{key}\n\n{_text(member)}"
        else:
            text += "\n" + _function(f"{name}.{key}", member, 4)
    return text


def _function(name: str, function: Any, level: int) -> str:
    """Return the heading, the signatures and the text of a function or method."""
    forms = get_overloads(function) or [function]
    signatures = "\n".join(_signature(name, form) for form in forms)
    return f"{'#' * level} {name}\n\n```text\n{signatures}\n```\n\n{_text(function)}"


def _signature(name: str, function: Any) -> str:
    """Return the signature of a function as it is in the source, without `self`."""
    node = _parsed(inspect.getsource(function))
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = node.args
    for argument in (*arguments.args, *arguments.kwonlyargs, *filter(None, (arguments.kwarg,))):
        argument.annotation = _unquoted(argument.annotation)
    arguments.args = [argument for argument in arguments.args if argument.arg != "self"]
    result = _unquoted(node.returns)
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    inside = re.sub(r"Unpack\[(\w+)\]", r"\1", ast.unparse(arguments)).replace("=", " = ")
    shown = "" if result is None else f" -> {ast.unparse(result)}"
    line = f"{prefix}{name}({inside}){shown}"
    if len(line) <= 100:
        return line
    return f"{prefix}{name}(\n{_lines(inside)}){shown}"


def _lines(arguments: str) -> str:
    """Return one line for each argument of a signature."""
    depth, lines = 0, [""]
    for char in arguments:
        depth += (char in "[(") - (char in "])")
        lines[-1] += char
        if char == "," and not depth:
            lines.append("")
    return "".join(f"    {line.strip()}\n" for line in lines)


def _types() -> str:
    """Return the type aliases and their docstrings."""
    parts: list[str] = []
    for module, names in _TYPES.items():
        body = ast.parse(inspect.getsource(module)).body
        for node, following in pairwise(body):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names:
                assert isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                parts.append(f"### {ast.unparse(node.targets[0])}\n\n```text\n{ast.unparse(node)}\n```\n")
                parts.append(inspect.cleandoc(following.value.value) + "\n")
    return "\n".join(parts)


def _unquoted(annotation: Any) -> Any:
    """Return a type without the quotes that a type has if it is defined later."""
    quoted = isinstance(annotation, ast.Constant) and isinstance(annotation.value, str)
    return _parsed(annotation.value).value if quoted else annotation


def _parsed(source: str) -> Any:
    return ast.parse(textwrap.dedent(source)).body[0]


def _text(member: object) -> str:
    """Return a docstring as Markdown: its sections become lists."""
    text = inspect.getdoc(member) or ""
    if dataclasses.is_dataclass(member) and text.startswith(f"{getattr(member, '__name__', '')}("):
        return ""
    parts = _SECTION.split(text)
    lines = [parts[0].strip(), ""]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        body, _, after = body.partition("\n\n") if not body.strip("\n").startswith(" ") else (body, "", "")
        lines += [f"{_TITLES[title]}:", "", *_entries(body), ""]
        lines += [inspect.cleandoc(after), ""] if after.strip() else []
    return "\n".join(lines).rstrip() + "\n"


def _entries(body: str) -> list[str]:
    """Return the entries of a docstring section as list items."""
    items: list[str] = []
    for line in inspect.cleandoc(body).splitlines():
        if not line.startswith(" ") and (entry := _ENTRY.match(line)):
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            items.append(f"* {names}: {entry[2]}")
        elif items:
            items[-1] += f" {line.strip()}"
        else:
            items.append(line)
    return [textwrap.fill(item, 120, subsequent_indent="  ", break_on_hyphens=False) for item in items]


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
