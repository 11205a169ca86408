"""Parse Gemma 4's format: `<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from helexa.neuron.parsers.argument_values import bare_value, dumps, strict_loads
from helexa.neuron.parsers.json_call import read_arguments, take_surplus
from helexa.neuron.parsers.json_value import repaired_json
from helexa.neuron.parsers.keyed_arguments import KeyedArguments
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Markers, NotACall, Reading, Source

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_OPENS, _CLOSES, _QUOTES, _CALLS = Markers([OPEN]), Markers([CLOSE]), Markers([QUOTE]), Markers(["call:"])
_BRACE, _BRACE_END, _COLON, _COMMA = Markers(["{"]), Markers(["}"]), Markers([":"]), Markers([","])
_KEY_END, _JSON = ":", Markers(['{"', '{{"'])
_BEFORE_VALUE = re.compile(r"\s*:")
_KEY = re.compile(r'[^][{}<>,:"]+')
_PLAIN_QUOTE = '"'
_LITERAL_PARTS, _TOKENS = Markers(["<", _PLAIN_QUOTE, "{", "[", "}", "]", ","]), Markers([QUOTE, CLOSE])
_PLAIN_QUOTES = Markers([_PLAIN_QUOTE, "\\"])
_OPENING, _CLOSING = ("{", "["), ("}", "]")
_MAX_DEPTH = 50
# A string, a syntax character, or a bare word: a key or a scalar. Plain quotation marks are a mistake of the model.
_TOKEN = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<syntax>[][{}:,])|(?P<bare>[^][{}:,<"]+|<|")',
    re.DOTALL,
)


class Gemma4:
    """The Gemma 4 format: an object with bare keys.

    The token `<|"|>` encloses strings. A string contains no escape sequences. Top-level strings are streamed, and other
    values are added when they are complete. The parser also accepts arguments in JSON, strings in plain quotation
    marks, Python's literals, and a missing end marker.
    """

    name = "gemma4"
    markers = frozenset({OPEN, CLOSE, QUOTE})
    openers = (OPEN,)
    leading: tuple[str, ...] = ()
    closers = (CLOSE,)

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one tool call."""
        yield from source.expect(_OPENS)
        yield from source.space()
        if (yield from source.marker(_CLOSES)):  # an empty pair of markers is dropped
            source.settle()
            return
        yield from source.expect(_CALLS)
        name = yield from source.name()
        yield from source.space()
        if (yield from source.upcoming(_JSON)):
            output.check(name)
            yield from read_arguments(source, output, name, _CLOSES)
            yield from take_surplus(source)
        else:
            yield from source.expect(_BRACE)
            output.check(name)
            yield from _read_arguments(source, output, name)
        yield from source.space()
        if (yield from source.marker(_CLOSES)):
            source.settle()


def _read_arguments(source: Source, output: Output, name: str) -> Reading[None]:
    arguments = KeyedArguments(source, output, name)
    while True:
        yield from source.space()
        if (yield from source.marker(_BRACE_END)):
            arguments.end()
            return
        if arguments.begun and (yield from source.upcoming(_CLOSES)):
            arguments.repaired("bracket")
            arguments.end()
            return
        key = yield from _read_key(source)
        arguments.key(key)
        yield from source.space()
        if (yield from source.marker(_QUOTES)):
            arguments.quote()
            if not (yield from source.until(_QUOTES, arguments.text)):
                raise NotACall
            yield from source.marker(_QUOTES)
            arguments.quote()
        else:
            literal = yield from _read_literal(source)
            value, repair = _json_text(literal.strip(), output.parameter(name, key))
            if repair:
                arguments.repaired(repair)
            arguments.value(value)
        yield from source.space()
        if not (yield from source.marker(_COMMA)) and not (yield from source.upcoming(_ENDS)):
            raise NotACall


_ENDS = Markers(["}", CLOSE])


def _read_key(source: Source) -> Reading[str]:
    if (yield from source.marker(_QUOTES)):
        key = yield from source.key(QUOTE)
        yield from source.space()
        yield from source.expect(_COLON)
        return key
    key = (yield from source.key(_KEY_END)).strip()
    if len(key) > 1 and key[0] == key[-1] == _PLAIN_QUOTE:
        key = key[1:-1]
    if not _KEY.fullmatch(key):
        raise NotACall
    return key


def _read_literal(source: Source) -> Reading[str]:
    """Return the text of a value that is no string, up to a comma or bracket."""
    pieces: list[str] = []
    depth = 0
    while True:
        part = yield from source.until(_LITERAL_PARTS, pieces.append)
        # The quotation mark in `<|"|>` is also a part, so the token is looked for from its first character on.
        marker = (yield from source.upcoming(_TOKENS)) if part == "<" else part
        if not part:
            raise NotACall
        if marker == CLOSE or (part in (",", *_CLOSING) and not depth):
            return "".join(pieces)
        pieces.append(source.take(source.at + len(marker or part)))
        if marker == QUOTE:
            yield from _read_quoted(source, pieces.append, _QUOTES)
        elif part == _PLAIN_QUOTE:
            yield from _read_quoted(source, pieces.append, _PLAIN_QUOTES)
        elif part in _OPENING:
            depth += 1
            if depth > _MAX_DEPTH:
                raise NotACall
        elif part in _CLOSING:
            depth -= 1


def _read_quoted(source: Source, sink: Callable[[str], None], ends: Markers) -> Reading[None]:
    """Pass a string inside a literal to `sink`, with the quotation mark at its end."""
    while part := (yield from source.until(ends, sink)):
        sink(source.take(source.at + len(part)))
        if part != "\\":
            return
        sink(source.take(source.at + len((yield from source.peek()))))
    raise NotACall


def _json_text(literal: str, schema: Mapping[str, Any]) -> tuple[str, str]:
    """Return the JSON text of a literal, and the name of the repaired mistake or ""."""
    if not literal.startswith(("{", "[", _PLAIN_QUOTE)):
        value = bare_value(literal, schema)
        if value is None:
            raise NotACall
        return value
    # Only strings and bare words differ from JSON. The rest of the literal stays as it is.
    text = "".join(_json_token(match) for match in _TOKEN.finditer(literal))
    try:
        strict_loads(text)
    except ValueError:
        return repaired_json(text, schema), "value"
    return text, ""


def _json_token(token: re.Match[str]) -> str:
    if token["text"] is not None:
        return dumps(token["text"])
    bare = token["bare"]
    if not bare or not bare.strip():
        return token[0]
    # A bare word before a colon is a key, and keys are always strings.
    value = None if _BEFORE_VALUE.match(token.string, token.end()) else bare_value(bare.strip(), {})
    return dumps(bare.strip()) if value is None else value[0]
