"""Parse a call written as a JSON object: `{"name": ..., "arguments": {...}}`."""

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
    """Parse a JSON object as the arguments of a call of the tool `name`, and report its text while it arrives.

    Raises:
        NotACall: the text is not a JSON object. If arguments were already reported, the reported call stays incomplete.
    """
    if (yield from source.peek()) != "{":
        raise NotACall

    def pass_on(fragment: str) -> None:
        source.settle()
        output.arguments(fragment)

    output.start(name)
    yield from read_json(source, pass_on)
    output.end()


def read_call(source: Source, output: Output, *, known: bool = False, untagged: bool = False) -> Reading[None]:
    """Parse one call. Arguments that follow the tool's name are streamed; arguments before the name are reported at the
    end.

    Tolerated errors: missing arguments, arguments written as a string, the tool's name inside the arguments, and a
    missing closing brace. The keys `id` and `type` are dropped, and so is any other key that follows the name or the
    arguments.

    Args:
        source: the model's unread text.
        output: receives the call.
        known: accept only names of offered tools.
        untagged: no tag marks the object as a call. The object must have the name of an offered tool and `arguments`,
            and only `id` and `type` may precede the arguments. Parsing stops at the first character that rules out a
            call.

    Raises:
        NotACall: the text is not a call. If arguments were already reported, the reported call stays incomplete.
    """
    name: str | None = None
    arguments: str | None = None
    started = has_other_keys = False
    yield from source.expect(_OPEN)
    yield from source.space()
    has_next = not (yield from source.marker(_CLOSE))
    while has_next:
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
            has_other_keys |= key not in _IGNORED
            yield from read_json_text(source)
        else:
            raise NotACall
        yield from source.space()
        separator = yield from source.marker(_NEXT)
        if not separator and not started:
            raise NotACall
        has_next = separator == ","
        if has_next:
            yield from source.space()
    if not started:
        if (arguments is None and has_other_keys) or (untagged and None in (name, arguments)):
            raise NotACall
        name, arguments = _repair(output, name, arguments)
        output.check(name, known=known)
        output.start(name)
        output.arguments(arguments)
        output.end()
    source.settle()


def take_surplus(source: Source) -> Reading[None]:
    """Read white space and up to three surplus braces after a call.

    The text read stays unsettled: it is dropped if the caller settles it, else reported as plain text.
    """
    yield from source.space()
    for _ in range(_MAX_SURPLUS):
        if not (yield from source.marker(_CLOSE)):
            return
        yield from source.space()


def _key(source: Source, beginnings: Markers) -> Reading[str]:
    """Parse a key of a JSON object and the colon after it; return the key. The key must start with one of `beginnings`.

    The key must start with one of `beginnings`.
    """
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


def _repair(output: Output, name: str | None, arguments: str | None) -> tuple[str, str]:
    """Return the tool name and the arguments' JSON text of a call whose JSON is malformed in a known manner.

    Raises:
        NotACall: the call cannot be repaired.
    """
    arguments = "null" if arguments is None else arguments
    try:
        value = json.loads(arguments)
        if isinstance(value, str):
            value = strict_loads(value)
            arguments = dumps(value)
        if value is None:
            value, arguments = {}, "{}"
        if isinstance(value, dict) and name is None:
            name = value.pop("name", None)
            arguments = dumps(value)
            output.check(name if isinstance(name, str) else "", known=True)
    except (ValueError, RecursionError):  # invalid JSON, or a value that cannot be serialized
        raise NotACall from None
    if not isinstance(value, dict) or not isinstance(name, str):
        raise NotACall
    return name, arguments
