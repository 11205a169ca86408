"""Parse the Pythonic formats: function calls such as `name(key=value, ...)`."""

import ast
import re
import warnings
from collections.abc import Mapping
from sys import maxunicode
from typing import Any

from helexa.neuron.parsers.argument_values import bare_value, dumps, strict_loads
from helexa.neuron.parsers.json_call import read_calls
from helexa.neuron.parsers.json_value_and_repair import repaired_json
from helexa.neuron.parsers.keyed_arguments import KeyedArguments
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Markers, NotACall, Reading, Source

_QUOTES = Markers(["'", '"'])
_LITERAL_ENDS = {end: Markers([end, "\\"]) for end in ("'", '"', "'''", '"""')}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_ESCAPED |= {char: char for char in "\\'\"/"}
_WIDTHS = {"x": 2, "u": 4, "U": 8}
_PLUS = Markers(["+"])
_BARE = re.compile(r"[\w+./~-]")  # the beginning of a value without quotation marks
_LOOKAHEAD = 150
# What follows a string: a bracket, another argument, a comma before a bracket, or another literal.
_FOLLOWING = re.compile(r"""\s*\)[ \t]*(?:\s*[,\]);]|\s*<[|/]|\n)|\s*,\s*(?:[\w.:/-]+\s*=|\))|\s+["']|\s*\+\s*["']""")
_PART_OF_FOLLOWING = re.compile(r"""\s*\)[ \t]*<?|\s*,\s*[\w.:/-]*\s*|\s*\+?\s*""")
_OCTAL, _HEXADECIMAL = "01234567", "0123456789abcdefABCDEF"

_LIST, _NEXT, _LIST_END = Markers(["["]), Markers([",", "]"]), Markers(["]"])
_JSON = Markers(["{", "[{", "```"])
_BRACKET, _BRACKET_END, _EQUALS, _COMMA = Markers(["("]), Markers([")"]), Markers(["="]), Markers([","])
_MAX_DEPTH = 50


def _read_string(source: Source, arguments: KeyedArguments) -> Reading[bool]:
    """Parse and stream adjacent string literals as the value of an argument.

    Line breaks are allowed in all literals. Return False if the text at the current position is not a string literal.

    Raises:
        NotACall: the output ended inside the string. The arguments that were already added stay in the output.
    """
    if not (yield from source.upcoming(_QUOTES)):
        return False
    arguments.quote()
    # Python joins adjacent literals. Models also join them with a plus sign.
    while quote := (yield from source.marker(_QUOTES)):
        yield from _read_one(source, arguments, quote)
        yield from source.space()
        if (yield from source.marker(_PLUS)):
            arguments.repaired("concatenation")
            yield from source.space()
            if not (yield from source.upcoming(_QUOTES)):
                raise NotACall
    arguments.quote()
    return True


def _read_one(source: Source, arguments: KeyedArguments, quote: str) -> Reading[None]:
    """Parse one string literal, after its first quotation mark, `quote`."""
    end = quote
    # Two quotation marks are an empty string, or the beginning of a triple-quoted string.
    if (yield from source.peek()) == quote:
        source.take(source.at + 1)
        if (yield from source.peek()) != quote:
            return
        source.take(source.at + 1)
        end = quote * 3
    while True:
        marker = yield from source.until(_LITERAL_ENDS[end], arguments.text)
        if not marker:
            raise NotACall
        # Models forget to escape quotation marks. The text after the mark decides whether it ends the string.
        ends = marker == end and (len(end) == 3 or (yield from _ends_literal(source)))
        source.take(source.at + len(marker))
        if ends:
            return
        if marker == end:
            arguments.repaired("quotes")
            arguments.text(marker)
            continue
        arguments.text((yield from _read_escape(source)))


def _ends_literal(source: Source) -> Reading[bool]:
    """Return whether the quotation mark at the current position ends a string literal."""
    while True:
        rest = source.text[source.at + 1 : source.at + 1 + _LOOKAHEAD]
        if _FOLLOWING.match(rest):
            return True
        if source.ended or len(rest) == _LOOKAHEAD or not _PART_OF_FOLLOWING.fullmatch(rest):
            return rest.strip() in ("", ")")
        yield


def _read_escape(source: Source) -> Reading[str]:
    """Parse an escape sequence after its backslash. Return the text it represents."""
    char = yield from source.peek()
    source.take(source.at + len(char))
    if char and char in _OCTAL:
        return chr(int(char + (yield from _digits(source, _OCTAL, 2)), 8))
    limit = _WIDTHS.get(char, 0)
    digits = yield from _digits(source, _HEXADECIMAL, limit)
    if limit and len(digits) == limit and int(digits, 16) <= maxunicode:
        return chr(int(digits, 16))
    # Python keeps unknown escape sequences, too.
    return _ESCAPED.get(char, f"\\{char}{digits}")


def _digits(source: Source, allowed: str, limit: int) -> Reading[str]:
    digits = ""
    while len(digits) < limit and (char := (yield from source.peek())) and char in allowed:
        digits += source.take(source.at + 1)
    return digits


class Pythonic:
    """The Pythonic format of Llama 4 and LFM2: a Python list of function calls.

    The list is at the beginning of the output, or anywhere after the marker `start`. String arguments are streamed, and
    other arguments are added when they are complete. After the marker, the parser also accepts JSON calls.

    Args:
        start, end: markers before and after the list.
    """

    leading: tuple[str, ...] = ("[",)

    def __init__(self, name: str, start: str, end: str) -> None:
        self.name = name
        self.start, self.end = start, end
        self.markers = frozenset({start, end})
        self.openers = (start,)
        self.closers = (end,)
        self._starts, self._ends = Markers([start]), Markers([end])

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one list of tool calls, and add the calls to `output`."""
        marked = yield from source.marker(self._starts)
        yield from source.space()
        if marked and (yield from source.upcoming(_JSON)):
            yield from read_calls(source, output, self._ends)
        else:
            if not (yield from source.marker(_LIST)) and not marked:  # between the markers, `[` may be missing
                raise NotACall
            yield from self._read_list(source, output, known=not marked)
            source.settle()
        yield from source.space()
        if (yield from source.marker(self._ends)):
            source.settle()

    def _read_list(self, source: Source, output: Output, *, known: bool) -> Reading[None]:
        """Parse calls and the closing bracket.

        The bracket may be missing before the marker `end` and at the end of the output.
        """
        while True:
            yield from source.space()
            yield from _read_call(source, output, known=known)
            yield from source.space()
            if not (separator := (yield from source.marker(_NEXT))):
                if not (yield from source.upcoming(self._ends)) and not source.complete:
                    raise NotACall
                output.repairs.add("bracket")
            if separator != ",":
                return
            yield from source.space()
            if (yield from source.marker(_LIST_END)):  # a trailing comma
                return


class PythonicLines(Pythonic):
    """The format of OLMo 3: function calls in lines of their own, between two markers."""

    leading = ()

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse the calls between the markers. The last marker may be missing."""
        yield from source.expect(self._starts)
        while True:
            yield from source.space()
            # Commas between the calls are accepted, too.
            yield from source.marker(_COMMA)
            yield from source.space()
            if (yield from source.marker(self._ends)) or (output.named and source.complete):
                source.settle()
                return
            yield from _read_call(source, output, known=False)
            source.settle()


def _read_call(source: Source, output: Output, *, known: bool) -> Reading[None]:
    name = yield from source.name()
    output.check(name, known=known)
    yield from source.expect(_BRACKET)
    yield from read_keywords(source, output, name)


def read_keywords(source: Source, output: Output, name: str) -> Reading[None]:
    """Parse keyword arguments after the opening bracket, and the closing bracket.

    Add the call of the tool `name`, which the caller has checked (`Output.check`), to `output`.

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
        if not (yield from _read_string(source, arguments)):
            literal = yield from _read_literal(source)
            value, repair = _json_text(literal, output.parameter(name, key))
            if repair:
                arguments.repaired(repair)
            arguments.value(value)
        yield from source.space()
        if not (yield from source.marker(_COMMA)) and not (yield from source.upcoming(_BRACKET_END)):
            raise NotACall


def _read_literal(source: Source) -> Reading[str]:
    """Return the text of a literal other than a string, up to a comma or bracket."""
    pieces: list[str] = []
    depth, quote, escaped = 0, "", False
    while True:
        text, at = source.text, source.at
        while at < len(text):
            char = text[at]
            # A bracket or comma inside a string does not end the literal.
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
    """Return the JSON text of a literal, and the name of the repaired mistake or "".

    Text that is no Python literal, such as a word or an expression, becomes a string.
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
    """Convert a Python literal to JSON text. Return the text and True.

    For other text, the second value is False, and the first value is:

    * JSON text, for a list or dict that could be repaired.
    * `text` itself, for a word or an expression.
    * "", for text that cannot be the value of an argument.

    Raises:
        NotACall: a list or dict cannot be repaired, or the literal has a value that JSON does not have.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of unknown escape sequences, and keeps their text
            value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        if text.startswith(("{", "[")):
            return repaired_json(text), False
        # A word, a date, a code such as `007` or an expression. The caller converts this text.
        return text if text.isprintable() and _BARE.match(text) else "", False
    try:
        return dumps(value), True
    except (ValueError, TypeError, RecursionError):
        raise NotACall from None


LLAMA_4 = Pythonic("pythonic", "<|python_start|>", "<|python_end|>")
LFM2 = Pythonic("lfm2", "<|tool_call_start|>", "<|tool_call_end|>")
OLMO_3 = PythonicLines("olmo3", "<function_calls>", "</function_calls>")
