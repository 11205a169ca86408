"""A call as a JSON object: `{"name": ..., "arguments": {...}}`."""

import json

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source
from helexa.neuron.parsers.values.json_text import dumps, strict_loads
from helexa.neuron.parsers.values.json_value import read_json, read_json_text

_OPEN, _COLON, _NEXT = Markers(["{"]), Markers([":"]), Markers([",", "}"])
_CLOSE, _QUOTE = Markers(["}"]), Markers(['"'])
_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "type")
_UNTAGGED_KEYS = Markers(['"name"', '"arguments"', '"id"', '"type"'])
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


def read_call(source: Source, output: Output, *, known: bool = False, untagged: bool = False) -> Reading[None]:
    """Take one call. Its arguments are passed on as they come where its name is before them, else when it is complete.

    Repaired are: no arguments at all, arguments written as a string, the name of a tool inside the arguments, and no
    brace at the end. `id` and `type` are left out, as is whatever else stands beside arguments and behind one of both.

    Args:
        known: there must be such a tool.
        untagged: nothing but the object shows that this is a call. The object must have the name of an offered tool and
            `arguments`, and no other key before the arguments but `id` and `type`. The first character that rules a
            call out ends the reading.

    Raises:
        NotACall: the text is no call; what was passed on of it then stays, incomplete.
    """
    name: str | None = None
    arguments: str | None = None
    started = crowded = False
    yield from source.expect(_OPEN)
    yield from source.space()
    more = not (yield from source.marker(_CLOSE))
    while more:
        key = yield from _key(source, _UNTAGGED_KEYS if untagged and not started else _QUOTE)
        if key == "name" and name is None:
            if untagged and not (yield from source.upcoming(output.quoted_names)):
                raise NotACall
            name = _loaded_name((yield from read_json_text(source)))
            output.check(name, known=known)
        elif key in _ARGUMENTS and arguments is None:
            if name is not None and (yield from source.peek()) == "{":
                started, arguments = True, ""
                yield from read_arguments(source, output, name)
            else:
                arguments = yield from read_json_text(source)
        elif key in _IGNORED or name is not None or arguments is not None:
            crowded |= key not in _IGNORED
            yield from read_json_text(source)
        else:
            raise NotACall
        yield from source.space()
        found = yield from source.marker(_NEXT)
        if not found and not started:
            raise NotACall
        more = found == ","
        if more:
            yield from source.space()
    if not started:
        if (arguments is None and crowded) or (untagged and None in (name, arguments)):
            raise NotACall
        name, arguments = _repaired(output, name, arguments)
        output.check(name, known=known)
        output.start(name)
        output.arguments(arguments)
        output.end()
    source.settle()


def take_surplus(source: Source) -> Reading[None]:
    """Take white space and up to three braces too many: text, unless what follows is what is due, and settles them."""
    yield from source.space()
    for _ in range(_MAX_SURPLUS):
        if not (yield from source.marker(_CLOSE)):
            return
        yield from source.space()


def _key(source: Source, beginnings: Markers) -> Reading[str]:
    """Take a key, which must begin with one of `beginnings`, and its colon."""
    if not (yield from source.upcoming(beginnings)):
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


def _repaired(output: Output, name: str | None, arguments: str | None) -> tuple[str, str]:
    """The name and the text of the arguments of a call that is not as it should be."""
    arguments = "null" if arguments is None else arguments
    try:
        given = json.loads(arguments)
        if isinstance(given, str):
            given = strict_loads(given)
            arguments = dumps(given)
        if given is None:
            given, arguments = {}, "{}"
        if isinstance(given, dict) and name is None:
            name = given.pop("name", None)
            arguments = dumps(given)
            output.check(name if isinstance(name, str) else "", known=True)
    except (ValueError, RecursionError):  # it is no JSON, or none that can be written again
        raise NotACall from None
    if not isinstance(given, dict) or not isinstance(name, str):
        raise NotACall
    return name, arguments
