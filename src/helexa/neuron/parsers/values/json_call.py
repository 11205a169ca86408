"""Parse a tool call that is a JSON object: `{"name": ..., "arguments": {...}}`."""

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
    """Parse a JSON object that contains the arguments for a call of the tool `name`. The arguments are streamed.

    Raises:
        NotACall: the text is not a JSON object. If arguments were already added to `output`, the call stays incomplete.
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
    """Parse one tool call that is a JSON object.

    Arguments are streamed if they follow the tool's name. Otherwise, they are added to `output` at the end of the call.

    The parser accepts missing arguments, arguments written as a string, the tool's name inside the arguments, and a
    missing closing brace. The keys `id` and `type` are dropped. Other keys are also dropped if they follow the name or
    the arguments.

    Args:
        source: the model's unread text.
        output: receives the tool call.
        known: whether only the names of tools in the request are accepted.
        untagged: whether the object is in plain text, without a tag that marks it as a tool call. In this case, the
            object must have `arguments` and the name of a tool in the request. Before the arguments, only the keys
            `name`, `id` and `type` are allowed. Parsing stops at the first character that rules out a tool call.

    Raises:
        NotACall: the text is not a tool call. If arguments were already added to `output`, the call stays incomplete.
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
    """Read white space and up to three surplus closing braces after a tool call.

    If the caller then calls `source.settle`, the white space and the braces are dropped. Otherwise, they become plain
    text of the response.
    """
    yield from source.space()
    for _ in range(_MAX_SURPLUS):
        if not (yield from source.marker(_CLOSE)):
            return
        yield from source.space()


def _key(source: Source, beginnings: Markers) -> Reading[str]:
    """Read a key of a JSON object and the colon after it, and return the key.

    Raises:
        NotACall: the text does not begin with one of `beginnings`, or no colon follows the key.
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
    """Return the tool name and the JSON text of the arguments, for a tool call in malformed JSON.

    Arguments may be missing or written as a string, and the tool name may be inside the arguments.

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
