"""Parse string literals of Python or JSON in streamed text."""

from sys import maxunicode

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.keyed_arguments import KeyedArguments

_QUOTES = Markers(["'", '"'])
_ENDS = {end: Markers([end, "\\"]) for end in ("'", '"', "'''", '"""')}
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_ESCAPED |= {char: char for char in "\\'\"/"}
_WIDTHS = {"x": 2, "u": 4, "U": 8}
_OCTAL, _HEXADECIMAL = "01234567", "0123456789abcdefABCDEF"


def read_string(source: Source, arguments: KeyedArguments) -> Reading[bool]:
    """Parse a string literal, or adjacent string literals, as the value of an argument. The string is streamed.

    Line breaks are allowed in all literals. Unknown escape sequences stay unchanged.

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
        source.take(source.at + len(marker))
        if marker == end:
            return
        arguments.text((yield from _read_escape(source)))


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
