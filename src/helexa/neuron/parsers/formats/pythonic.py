"""Parse tool calls in the form of a Python list, `[f(a=1, b="x"), g()]`, as Llama 4 and other models write them."""

import ast
import warnings
from collections.abc import Mapping
from typing import Any

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.json_scalar import bare_value
from helexa.neuron.parsers.values.json_text import dumps, strict_loads
from helexa.neuron.parsers.values.json_value import repaired_json
from helexa.neuron.parsers.values.keyed_arguments import KeyedArguments
from helexa.neuron.parsers.values.python_string import read_string

_START, _END = "<|python_start|>", "<|python_end|>"
_STARTS, _ENDS = Markers([_START]), Markers([_END])
_LIST, _NEXT, _LIST_END = Markers(["["]), Markers([",", "]"]), Markers(["]"])
_BRACKET, _BRACKET_END, _EQUALS, _COMMA = Markers(["("]), Markers([")"]), Markers(["="]), Markers([","])
_MAX_DEPTH = 50


class Pythonic:
    """The Pythonic format: a Python list of function calls. The arguments are literals.

    The list is at the beginning of the output, or anywhere after `<|python_start|>`. String arguments are streamed, and
    other arguments are added when they are complete.
    """

    name = "pythonic"
    markers = frozenset({_START, _END})
    openers = (_START,)
    leading = ("[",)
    closers: tuple[str, ...] = (_END,)

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one list of tool calls."""
        marked = yield from source.marker(_STARTS)
        yield from source.space()
        yield from source.expect(_LIST)
        while True:
            yield from source.space()
            name = yield from source.name()
            output.check(name, known=not marked)
            yield from source.expect(_BRACKET)
            yield from read_keywords(source, output, name)
            yield from source.space()
            if not (separator := (yield from source.marker(_NEXT))):
                if not (yield from source.upcoming(_ENDS)) and not source.complete:
                    raise NotACall
                output.repairs.add("bracket")
            if separator != ",":
                break
            yield from source.space()
            if (yield from source.marker(_LIST_END)):  # a trailing comma
                break
        source.settle()
        yield from source.space()
        if (yield from source.marker(_ENDS)):
            source.settle()


def read_keywords(source: Source, output: Output, name: str) -> Reading[None]:
    """Parse the keyword arguments of a call of the tool `name`, and the closing bracket.

    The opening bracket was already read.

    Raises:
        NotACall: the text is not a list of keyword arguments. If arguments were already added to `output`, the call
            stays incomplete.
    """
    arguments = KeyedArguments(source, output, name)
    while True:
        yield from source.space()
        if (yield from source.marker(_BRACKET_END)):
            arguments.end()
            return
        key = yield from source.name()
        yield from source.space()
        yield from source.expect(_EQUALS)
        arguments.key(key)
        yield from source.space()
        if not (yield from read_string(source, arguments)):
            literal = yield from _read_literal(source)
            value, repair = _json_text(literal, output.parameter(name, key))
            if repair:
                arguments.repaired(repair)
            arguments.value(value)
        yield from source.space()
        if not (yield from source.marker(_COMMA)) and not (yield from source.upcoming(_BRACKET_END)):
            raise NotACall


def _read_literal(source: Source) -> Reading[str]:
    """Read a literal other than a string, up to the next comma or closing bracket outside the literal.

    Return its text.
    """
    pieces: list[str] = []
    depth, quote, escaped = 0, "", False
    while True:
        text, at = source.text, source.at
        while at < len(text):
            char = text[at]
            if quote:
                if escaped:
                    escaped = False
                elif char == "\\":
                    escaped = True
                elif char == quote:
                    quote = ""
            elif char in "\"'":
                quote = char
            elif char in "([{":
                depth += 1
                if depth > _MAX_DEPTH:
                    raise NotACall
            elif char in ",)]}":
                if depth == 0:
                    pieces.append(source.take(at))
                    return "".join(pieces)
                depth -= char != ","
            at += 1
        pieces.append(source.take(at))
        if source.ended:
            raise NotACall
        yield


def _json_text(literal: str, schema: Mapping[str, Any]) -> tuple[str, str]:
    """Return the JSON text of a Python literal. Other text, such as a word or an expression, becomes a string.

    Return also the name of the repaired mistake, or "" if there is none.

    Raises:
        NotACall: the literal is empty, or has a value that JSON does not have.
    """
    text = literal.strip()
    try:
        strict_loads(text)  # models also write `true` and `null`
        is_python = True
    except ValueError:
        text, is_python = _python_json(text)
    if not text:
        raise NotACall
    if text.startswith(("{", "[", '"')):
        return text, "" if is_python else "value"
    value = bare_value(text, schema)
    if value is None:
        raise NotACall
    return value


def _python_json(text: str) -> tuple[str, bool]:
    """Return the JSON text of a Python literal and True. For other text, return text to convert and False."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown escape sequences keep their text
            value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        if text.startswith(("{", "[")):
            return repaired_json(text), False
        return text if text.isprintable() and text[:1].isalpha() else "", False
    try:
        return dumps(value), True
    except (ValueError, TypeError, RecursionError):
        raise NotACall from None
