"""Llama 4 and others: calls as a Python list, `[f(a=1, b="x"), g()]`."""

import ast
import warnings

from helexa.neuron.parsers.json_text import dumps, strict_loads
from helexa.neuron.parsers.keyed_arguments import KeyedArguments
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source

_START, _END = "<|python_start|>", "<|python_end|>"
_STARTS, _ENDS, _LIST, _NEXT = Markers([_START]), Markers([_END]), Markers(["["]), Markers([",", "]"])
_BRACKET, _BRACKET_END, _EQUALS = Markers(["("]), Markers([")"]), Markers(["="])
_MAX_DEPTH = 50


class Pythonic:
    """A list of calls where the answer begins, or behind the start token anywhere. Only literals are arguments.

    An argument is passed on when it is complete.
    """

    name = "pythonic"
    markers = frozenset({_START, _END})
    openers = (_START,)
    leading = ("[",)

    def read(self, source: Source, output: Output) -> Reading[None]:
        """As `Family` says."""
        yield from source.marker(_STARTS)
        yield from source.space()
        yield from source.expect(_LIST)
        while True:
            yield from source.space()
            name = yield from source.name()
            output.check(name)
            yield from source.expect(_BRACKET)
            yield from read_keywords(source, output, name)
            yield from source.space()
            if (yield from source.expect(_NEXT)) == "]":
                break
        source.settle()
        yield from source.space()
        if (yield from source.marker(_ENDS)):
            source.settle()


def read_keywords(source: Source, output: Output, name: str) -> Reading[None]:
    """Take keyword arguments of a call of `name` and the bracket after them.

    Raises:
        NotACall: the text is none.
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
        literal, end = yield from _read_literal(source)
        arguments.add(key, _json_text(literal))
        if end == ",":
            source.take(source.at + 1)


def _read_literal(source: Source) -> Reading[tuple[str, str]]:
    """Take a literal; it, and what ends it, unread: a comma or a closing bracket."""
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
                    return "".join(pieces), char
                depth -= char != ","
            at += 1
        pieces.append(source.take(at))
        if source.ended:
            raise NotACall
        yield


def _json_text(literal: str) -> str:
    text = literal.strip()
    try:
        strict_loads(text)  # also for `true` and `null`, which models mix in
        return text
    except ValueError:
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown escapes: what the model means by them is plain
            return dumps(ast.literal_eval(text))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise NotACall from None
