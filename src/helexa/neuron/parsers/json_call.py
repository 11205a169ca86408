"""A call as a JSON object: `{"name": ..., "arguments": {...}}`."""

import json

from helexa.neuron.parsers.json_text import dumps, strict_loads
from helexa.neuron.parsers.json_value import read_json, read_json_text
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source

_OPEN, _COLON, _NEXT = Markers(["{"]), Markers([":"]), Markers([",", "}"])
_CLOSE, _QUOTE = Markers(["}"]), Markers(['"'])
_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "type")
_MAX_SURPLUS = 3


def read_arguments(source: Source, output: Output, name: str) -> Reading[None]:
    """Take a JSON object as the arguments of a call of `name`, passed on as they come.

    Raises:
        NotACall: the text is no JSON object; what was passed on of it then stays, incomplete.
    """
    if (yield from source.peek()) != "{":
        raise NotACall

    def pass_on(piece: str) -> None:
        source.settle()
        output.arguments(piece)

    output.start(name)
    yield from read_json(source, pass_on)
    output.end()


def read_call(source: Source, output: Output) -> Reading[None]:
    """Take one call. Its arguments are passed on as they come where its name is before them, else when it is complete.

    Repaired are: no arguments at all, arguments written as a string, and a name that stands inside the arguments.
    `id` and `type` are accepted and left out; an object that has other members is none of a call.

    Raises:
        NotACall: the text is no call of a known tool.
    """
    name: str | None = None
    arguments: str | None = None
    started = False
    yield from source.expect(_OPEN)
    yield from source.space()
    more = not (yield from source.marker(_CLOSE))
    while more:
        key = yield from _key(source)
        if key == "name" and name is None:
            name = _loaded_name((yield from read_json_text(source)))
            output.check(name)
        elif key in _ARGUMENTS and arguments is None:
            if name is not None and (yield from source.peek()) == "{":
                started, arguments = True, ""
                yield from read_arguments(source, output, name)
            else:
                arguments = yield from read_json_text(source)
        elif key in _IGNORED:
            yield from read_json_text(source)
        else:
            raise NotACall
        yield from source.space()
        more = (yield from source.expect(_NEXT)) == ","
        if more:
            yield from source.space()
    if not started:
        name, arguments = _repaired(name, arguments)
        output.check(name)
        output.start(name)
        output.arguments(arguments)
        output.end()
    source.settle()


def read_surplus(source: Source, end: Markers) -> Reading[bool]:
    """Take the marker after a call, with up to three surplus braces before it; whether it is there."""
    yield from source.space()
    for _ in range(_MAX_SURPLUS):
        if not (yield from source.marker(_CLOSE)):
            break
        yield from source.space()
    if not (yield from source.marker(end)):
        return False
    source.settle()
    return True


def _key(source: Source) -> Reading[str]:
    if not (yield from source.upcoming(_QUOTE)):
        raise NotACall
    key = json.loads((yield from read_json_text(source)))
    yield from source.space()
    yield from source.expect(_COLON)
    yield from source.space()
    return key


def _loaded_name(text: str) -> str:
    name = json.loads(text)
    if not isinstance(name, str):
        raise NotACall
    return name


def _repaired(name: str | None, arguments: str | None) -> tuple[str, str]:
    """The name and the text of the arguments of a call that is not as it should be."""
    given = None if arguments is None else json.loads(arguments)
    if isinstance(given, str):
        try:
            given = strict_loads(given)
        except ValueError:
            raise NotACall from None
        arguments = dumps(given)
    if given is None:
        given, arguments = {}, "{}"
    if not isinstance(given, dict) or arguments is None:
        raise NotACall
    if name is None:
        name = given.pop("name", None)
        arguments = dumps(given)
    if not isinstance(name, str):
        raise NotACall
    return name, arguments
