"""Parse Gemma 4's format: `<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from helexa.neuron.parsers.argument_values import bare_value, dumps, strict_loads
from helexa.neuron.parsers.json_call import read_arguments, take_surplus
from helexa.neuron.parsers.json_value_and_repair import repaired_json
from helexa.neuron.parsers.keyed_arguments import KeyedArguments
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import MAX_NAME, Markers, NotACall, Reading, Source

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_OPENS, _CLOSES, _QUOTES, _CALLS = Markers([OPEN]), Markers([CLOSE]), Markers([QUOTE]), Markers(["call:"])
_BRACE, _BRACE_END, _COMMA, _SEPARATORS = Markers(["{"]), Markers(["}"]), Markers([","]), Markers([":", "="])
_KEY_ENDS, _JSON = Markers([":", "=", "\n"]), Markers(['{"', '{{"'])
_BEFORE_VALUE = re.compile(r"\s*:")
_KEY = re.compile(r'[^][{}<>,:="]+')
_PLAIN_QUOTE, _SINGLE_QUOTE = '"', "'"
_LITERAL_PARTS = Markers(["<", _PLAIN_QUOTE, _SINGLE_QUOTE, "{", "[", "}", "]", ","])
_TOKENS = Markers([QUOTE, CLOSE])
_PLAIN_QUOTES, _SINGLE_QUOTES = Markers([_PLAIN_QUOTE, "\\"]), Markers([_SINGLE_QUOTE, "\\"])
_OPENING, _CLOSING = ("{", "["), ("}", "]")
_VALUE_ENDS = (*_CLOSING, _PLAIN_QUOTE, _SINGLE_QUOTE)  # last characters of a value that is not a bare word
_MAX_DEPTH = 50
# A string, white space, a syntax character, or a bare word: a key or a scalar. Plain and single quotation marks are
# mistakes of the model.
_TOKEN = re.compile(
    r'<\|"\|>(?P<text>.*?)<\|"\|>|(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<syntax>[][{}:,])|(?P<space>\s+)'
    r"""|'(?P<single>(?:[^'\\]|\\.|'(?!\s*(?:[],}:]|\Z)))*)'|(?P<bare>[^][{}:,<"\s][^][{}:,<"]*|<|")""",
    re.DOTALL,
)
# What follows a single quotation mark if it ends a string.
_AFTER_SINGLE = re.compile(r"\s*[],}:<]")
# What follows a comma between two arguments: the next key, or the end.
_AFTER_COMMA = re.compile(
    r"""(?P<space>\s*)(?:(?:<\|"\|>|")?(?P<key>[^][{}<>,:="\s][^][{}<>,:="]*)(?:<\|"\|>|")?[:=]|\}|<tool_call\|>)"""
)
_MAX_AHEAD = 200  # number of characters that `_follows` looks ahead
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?")
_PYTHON_LITERALS = ("true", "false", "null", "True", "False", "None")


class Gemma4:
    """The tool-call format of Gemma 4: an object with bare keys.

    The token `<|"|>` encloses strings. A string contains no escape sequences. Top-level strings are streamed, and other
    values are added when they are complete. The parser also accepts arguments in JSON, strings in plain or single
    quotation marks or without the first `<|"|>`, Python's literals, `=` after a key, several calls, and a missing end
    marker.
    """

    name = "gemma4"
    markers = frozenset({OPEN, CLOSE, QUOTE})
    openers = (OPEN,)
    leading: tuple[str, ...] = ()
    closers = (CLOSE,)

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse the calls between one pair of markers, and add them to `output`."""
        yield from source.expect(_OPENS)
        yield from source.space()
        if (yield from source.marker(_CLOSES)):  # an empty pair of markers is dropped
            source.settle()
            return
        yield from source.expect(_CALLS)
        yield from _read_call(source, output)
        while (yield from source.marker(_CALLS)):  # another call between the same markers
            output.repairs.add("several_objects")
            yield from _read_call(source, output)
        if (yield from source.marker(_CLOSES)):
            source.settle()


def _read_call(source: Source, output: Output) -> Reading[None]:
    name = yield from source.name()
    yield from source.space()
    if (yield from source.upcoming(_JSON)) or (yield from source.upcoming(_CLOSES)):
        output.check(name)
        yield from read_arguments(source, output, name, _CLOSES)
        yield from take_surplus(source)
    else:
        yield from source.expect(_BRACE)
        output.check(name)
        yield from _read_arguments(source, output, name)
    yield from source.space()


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
        key, separator = yield from _read_key(source)
        if separator != ":":
            arguments.repaired("separator")
        arguments.key(key)
        yield from source.space()
        if (yield from source.marker(_QUOTES)):
            arguments.quote()
            if not (yield from source.until(_QUOTES, arguments.text)):
                raise NotACall
            yield from source.marker(_QUOTES)
            arguments.quote()
        else:
            literal = yield from _read_literal(source, output.schema(name))
            value, repair = _json_text(literal.strip(), output.parameter(name, key))
            if repair:
                arguments.repaired(repair)
            arguments.value(value)
        yield from source.space()
        if not (yield from source.marker(_COMMA)) and not (yield from source.upcoming(_ENDS)):
            raise NotACall


_ENDS = Markers(["}", CLOSE])


def _read_key(source: Source) -> Reading[tuple[str, str]]:
    """Read a key and the separator after it; return both."""
    if (yield from source.marker(_QUOTES)):
        key = yield from source.key(QUOTE)
        yield from source.space()
        return key, (yield from source.expect(_SEPARATORS))
    key = (yield from source.short(_KEY_ENDS, MAX_NAME))[0].strip()
    separator = yield from source.expect(_SEPARATORS)
    if len(key) > 1 and key[0] == key[-1] == _PLAIN_QUOTE:
        key = key[1:-1]
    if not _KEY.fullmatch(key):
        raise NotACall
    return key, separator


def _read_literal(source: Source, schema: Mapping[str, Any]) -> Reading[str]:
    """Return the text of a value without `<|"|>` before it, up to a comma or bracket.

    A comma ends the value only if another key or the end of the arguments follows. Otherwise, it is part of a text.
    `schema` is the JSON Schema of all arguments.
    """
    pieces: list[str] = []
    depth = 0
    has_comma = False
    while True:
        part = yield from source.until(_LITERAL_PARTS, pieces.append)
        # `until` would stop at the quotation mark in `<|"|>`, so this token must be recognized at its `<`.
        marker = (yield from source.upcoming(_TOKENS)) if part == "<" else part
        if not part:
            raise NotACall
        before = _last_character(pieces)
        if marker == CLOSE or (part in _CLOSING and not depth):
            return "".join(pieces)
        if part == "," and not depth:
            # A value that contains a comma is no scalar, so it is checked only at its first comma. Joining the pieces
            # at each comma would take quadratic time.
            is_scalar = not has_comma and _is_scalar("".join(pieces).strip())
            if is_scalar or before in _VALUE_ENDS or (yield from _ends_value(source, schema)):
                return "".join(pieces)
            has_comma = True
        if marker == QUOTE and not depth:  # the model omitted the `<|"|>` before the string
            source.take(source.at + len(QUOTE))
            return f"{QUOTE}{''.join(pieces).lstrip()}{QUOTE}"
        pieces.append(source.take(source.at + len(marker or part)))
        if marker == QUOTE:
            yield from _read_quoted(source, pieces.append, _QUOTES)
        elif part == _PLAIN_QUOTE:
            yield from _read_quoted(source, pieces.append, _PLAIN_QUOTES)
        elif part == _SINGLE_QUOTE and before in ("", "[", "{", ":", ","):
            yield from _read_single_quoted(source, pieces.append)
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


def _read_single_quoted(source: Source, sink: Callable[[str], None]) -> Reading[None]:
    """Pass the text of a single-quoted string, which may have apostrophes, to `sink`."""
    while part := (yield from source.until(_SINGLE_QUOTES, sink)):
        sink(source.take(source.at + 1))
        if part == "\\":
            sink(source.take(source.at + len((yield from source.peek()))))
        elif (yield from _follows(source, _AFTER_SINGLE)):
            return
    raise NotACall


def _follows(source: Source, pattern: re.Pattern[str], offset: int = 0) -> Reading[re.Match[str] | None]:
    """Return the match of `pattern` at `offset` characters ahead; None without one."""
    while True:
        start = source.at + offset
        match = pattern.match(source.text, start)
        if match or source.ended or len(source.text) - start > _MAX_AHEAD:
            return match
        yield


def _last_character(pieces: list[str]) -> str:
    """Return the last non-blank character of `pieces`, or ""."""
    return next((text[-1] for piece in reversed(pieces) if (text := piece.rstrip())), "")


def _is_scalar(value: str) -> bool:
    return value in _PYTHON_LITERALS or _NUMBER.fullmatch(value) is not None


def _ends_value(source: Source, schema: Mapping[str, Any]) -> Reading[bool]:
    """Return whether a key or the end of the arguments follows the comma ahead."""
    match = yield from _follows(source, _AFTER_COMMA, 1)
    if match is None or match["key"] is None:
        return match is not None
    # Models write no space between a comma and a key. After a space, words with a colon may be part of a text, so they
    # must be the name of a parameter.
    properties = schema.get("properties")
    return not match["space"] or not isinstance(properties, Mapping) or match["key"].strip() in properties


def _json_text(literal: str, schema: Mapping[str, Any]) -> tuple[str, str]:
    """Return the JSON text of a literal, and the name of the repaired mistake or ""."""
    if literal.startswith(QUOTE):
        return dumps(literal.removeprefix(QUOTE).removesuffix(QUOTE)), "quotes"
    if not literal.startswith(("{", "[", _PLAIN_QUOTE, _SINGLE_QUOTE)):
        value = bare_value(literal, schema)
        if value is None:
            raise NotACall
        return value
    # Only strings and bare words differ from JSON. The rest of the literal stays as it is.
    tokens = list(_TOKEN.finditer(literal))
    text = "".join(map(_json_token, tokens))
    try:
        strict_loads(text)
    except ValueError:
        return repaired_json(text, schema), "value"
    return text, "single_quotes" if any(token["single"] is not None for token in tokens) else ""


def _json_token(token: re.Match[str]) -> str:
    if token["text"] is not None:
        return dumps(token["text"])
    if token["single"] is not None:
        return dumps(token["single"].replace("\\'", "'"))
    bare = token["bare"]
    if not bare or not bare.strip():
        return token[0]
    # A bare word before a colon is a key, and keys are always strings.
    value = None if _BEFORE_VALUE.match(token.string, token.end()) else bare_value(bare.strip(), {})
    return dumps(bare.strip()) if value is None else value[0]
