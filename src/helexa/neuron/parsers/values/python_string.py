"""Parse string literals of Python or JSON in streamed text."""

import re
from sys import maxunicode

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.keyed_arguments import KeyedArguments

_QUOTES = Markers(["'", '"'])
_ENDS = {end: Markers([end, "\\"]) for end in ("'", '"', "'''", '"""')}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_ESCAPED |= {char: char for char in "\\'\"/"}
_WIDTHS = {"x": 2, "u": 4, "U": 8}
_PLUS = Markers(["+"])
_LOOKAHEAD = 150
# What follows a string: a bracket, another argument, a comma before a bracket, or another literal.
_FOLLOWING = re.compile(r"""\s*\)[ \t]*(?:\s*[,\]);]|\s*<\||\n)|\s*,\s*(?:[\w.:/-]+\s*=|\))|\s+["']|\s*\+\s*["']""")
_PART_OF_FOLLOWING = re.compile(r"""\s*\)[ \t]*<?|\s*,\s*[\w.:/-]*\s*|\s*\+?\s*""")
_OCTAL, _HEXADECIMAL = "01234567", "0123456789abcdefABCDEF"


def read_string(source: Source, arguments: KeyedArguments) -> Reading[bool]:
    """Parse a string literal, or adjacent string literals, as the value of an argument. The string is streamed.

    Line breaks are allowed in all literals. Unknown escape sequences stay unchanged. A quotation mark is a part of the
    string if the text after it can neither follow the string nor be a further literal.

    Returns:
        Whether a string literal was parsed. False if the text at the current position is not a string literal.

    Raises:
        NotACall: the output ended inside the string. The arguments that were already added stay in the output.
    """
    if not (yield from source.upcoming(_QUOTES)):
        return False
    arguments.quote()
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
    """Parse one string literal. The first quotation mark of the literal, `quote`, was already read."""
    end = quote
    if (yield from source.peek()) == quote:
        source.take(source.at + 1)
        if (yield from source.peek()) != quote:
            return
        source.take(source.at + 1)
        end = quote * 3
    while True:
        marker = yield from source.until(_ENDS[end], arguments.text)
        if not marker:
            raise NotACall
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
    """Parse an escape sequence, after its backslash, and return the text that it represents."""
    char = yield from source.peek()
    source.take(source.at + len(char))
    if char and char in _OCTAL:
        return chr(int(char + (yield from _digits(source, _OCTAL, 2)), 8))
    limit = _WIDTHS.get(char, 0)
    digits = yield from _digits(source, _HEXADECIMAL, limit)
    if limit and len(digits) == limit and int(digits, 16) <= maxunicode:
        return chr(int(digits, 16))
    return _ESCAPED.get(char, f"\\{char}{digits}")


def _digits(source: Source, allowed: str, limit: int) -> Reading[str]:
    digits = ""
    while len(digits) < limit and (char := (yield from source.peek())) and char in allowed:
        digits += source.take(source.at + 1)
    return digits
