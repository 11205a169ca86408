"""Parse a tool call written as `<function=NAME><parameter=KEY>VALUE</parameter></function>`."""

import re
from collections.abc import Callable

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.keyed_arguments import KeyedArguments

OPEN = "<function="
_PARAMETER, CLOSE, _CLOSE_PARAMETER, _CLOSE_CALL = "<parameter=", "</function>", "</parameter>", "</tool_call>"
_OPENS, _PARAMETERS, _BRACKET = Markers([OPEN]), Markers([_PARAMETER]), Markers([">"])
_CLOSES, _ENDS = Markers([CLOSE]), Markers([CLOSE, _CLOSE_CALL])
_VALUE_ENDS = Markers([_CLOSE_PARAMETER, _PARAMETER, CLOSE, _CLOSE_CALL])
_CLOSES_PARAMETER = Markers([_CLOSE_PARAMETER])
_FOLLOWING = Markers([_PARAMETER, CLOSE, _CLOSE_CALL])
_MAX_SPACE = 100
_SPACE = re.compile(r"\s*")
_LINE_BEGINS = re.compile(r"(?:\A|\n)[ \t]*\Z")


def read_function(source: Source, output: Output, *, known: bool) -> Reading[None]:
    """Parse one tool call. String arguments are streamed, and other arguments are added when they are complete.

    The tool's schema determines the types of the arguments. The end tags of parameters and of the function may be
    missing. One line break at the beginning and one at the end of a value belong to the format and are dropped.

    A tag inside a value is a part of the value if the text after the tag cannot follow the value.

    Args:
        source: the model's unread text.
        output: receives the tool call.
        known: whether only the names of tools in the request are accepted.

    Raises:
        NotACall: the text is not a tool call. If arguments were already added to `output`, the call stays incomplete.
    """
    yield from source.expect(_OPENS)
    name = yield from source.name()
    yield from source.expect(_BRACKET)
    output.check(name, known=known)
    arguments = KeyedArguments(source, output, name)
    while True:
        yield from source.space()
        if (yield from source.marker(_PARAMETERS)):
            key = yield from source.key(">")
            yield from arguments.read_bare(key, _read_value)
            yield from source.marker(_CLOSES_PARAMETER)
            source.settle()
        elif (yield from source.upcoming(_ENDS)) or (arguments.begun and source.complete):
            yield from source.marker(_CLOSES)
            arguments.end()
            return
        else:
            raise NotACall


def _read_value(source: Source, sink: Callable[[str], None]) -> Reading[bool]:
    """Read a value up to its end tag, which is not read, and pass the value to `sink` as it arrives.

    `</parameter>` ends the value if the next parameter or the end of the call follows. If the value begins with a line
    break, another tag ends the value only at the beginning of a line.

    Returns:
        Whether the value has an end. False if the output ended inside the value.
    """
    line = ""  # the last characters of the value, which show whether a tag begins a line

    def pass_on(chunk: str) -> None:
        nonlocal line
        line = (line + chunk)[-_MAX_SPACE:]
        sink(chunk)

    in_lines = (yield from source.peek()) == "\n"
    while tag := (yield from source.until(_VALUE_ENDS, pass_on)):
        if tag == _CLOSE_PARAMETER:
            if (yield from _call_follows(source)):
                return True
        elif not in_lines or _LINE_BEGINS.search(line):
            return True
        pass_on(source.take(source.at + len(tag)))
    return False


def _call_follows(source: Source) -> Reading[bool]:
    """Return whether the next parameter, the end of the call or the end of the output follows `</parameter>`."""
    while True:
        start = source.at + len(_CLOSE_PARAMETER)
        at = _SPACE.match(source.text, start).end()  # pyright: ignore[reportOptionalMemberAccess] - matches anything
        marker = _FOLLOWING.at(source.text, at, source.ended)
        if marker is not None or at - start > _MAX_SPACE:
            return bool(marker) or (at == len(source.text) and source.ended)
        yield
