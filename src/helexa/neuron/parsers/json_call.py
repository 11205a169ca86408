"""Parse a tool call that is a JSON object: `{"name": ..., "arguments": {...}}`."""

import json
from collections.abc import Mapping
from typing import Any

from helexa.neuron.parsers.argument_values import dumps, strict_loads
from helexa.neuron.parsers.json_value_and_repair import read_json, read_json_text, repaired_json
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NO_MARKERS, Markers, NotACall, Reading, Source

_OPEN, _COLON, _COMMA, _CLOSE = Markers(["{"]), Markers([":"]), Markers([","]), Markers(["}"])
_QUOTE = Markers(['"', "'"])
_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("id", "type", "tool_call_id")
_NAMES = ("function", "function_name", "tool", "tool_name")
_UNTAGGED_KEYS = Markers(['"name"', '"arguments"', '"id"', '"type"'])
_MAX_SURPLUS = 3
_FENCE, _LANGUAGE = Markers(["```"]), Markers(["json", "tool_call", "xml"])
_LIST, _LIST_END, _SEMICOLON = Markers(["["]), Markers(["]"]), Markers([";"])
_QUOTED_OBJECT = Markers(['"{"'])  # an object in quotation marks, whose own quotation marks were not escaped
_MAX_BARE_KEY = 32


def read_arguments(source: Source, output: Output, name: str, ends: Markers = NO_MARKERS) -> Reading[None]:
    """Add a call of the tool `name` to `output`; parse and stream its JSON arguments.

    The caller must check the name before (`Output.check`). Mistakes are repaired, as `JsonValue` describes. The markers
    `ends` end the call even if brackets are open, or if the arguments are missing.

    Raises:
        NotACall: the text cannot be repaired. If arguments were already added to `output`, the call stays incomplete.
    """
    if (yield from source.peek()) != "{":
        if not (yield from source.upcoming(ends)):
            raise NotACall
        output.start(name)
        output.arguments("{}")
        output.end()
        output.repairs.add("no_arguments")
        return

    def pass_on(fragment: str) -> None:
        source.settle()
        output.arguments(fragment)

    output.start(name)
    output.repairs |= yield from read_json(source, pass_on, schema=output.schema(name), ends=ends)
    output.end()


def add_call(output: Output, name: str, arguments: str) -> bool:
    """Add a complete call to `output`. Return False if name or arguments are invalid."""
    try:
        text = repaired_json(arguments, output.schema(name))
        output.check(name)
    except NotACall:
        return False
    output.start(name)
    output.arguments(text)
    output.end()
    return True


def read_calls(
    source: Source,
    output: Output,
    ends: Markers = NO_MARKERS,
    *,
    known: bool = False,
    name_key: str = "name",
    in_list: bool = False,
    in_fence: bool = False,
) -> Reading[None]:
    """Parse one or several tool calls that are JSON objects.

    The calls may be in a list or in a code fence. A list or fence that the format does not have is a repaired mistake.
    Surplus closing braces after each call are dropped. For the other arguments, see `read_call`.

    Args:
        in_list: whether the calls of the format are in a list.
        in_fence: whether the calls of the format are in a code fence.

    Raises:
        NotACall: the text is not a tool call, as in `read_call`.
    """
    fenced = yield from _read_fence(source)
    listed = yield from source.marker(_LIST)
    yield from source.space()
    calls, unseparated = 0, False
    while True:
        yield from read_call(source, output, ends, known=known, name_key=name_key)
        yield from take_surplus(source)
        calls += 1
        # Models also write several objects without a list, with semicolons or nothing between them.
        separator = yield from source.marker(_COMMA) if listed else source.marker(_SEMICOLON)
        yield from source.space()
        if not (yield from source.upcoming(_OPEN)):
            break
        unseparated = unseparated or not separator
    for ending in (_LIST_END if listed else NO_MARKERS, _FENCE if fenced else NO_MARKERS):
        if (yield from source.marker(ending)):
            source.settle()
            yield from source.space()
    # Missing commas in a list, and a comma at its end, are mistakes, too.
    if (not in_list or unseparated or separator) if listed else (calls > 1 and not separator):
        output.repairs.add("several_objects")
    if fenced and not in_fence:
        output.repairs.add("code_fence")


def _read_fence(source: Source) -> Reading[str]:
    """Read and return the beginning of a code fence, or ""."""
    fence = yield from source.marker(_FENCE)
    if fence:
        yield from source.marker(_LANGUAGE)
        yield from source.space()
    return fence


def read_call(
    source: Source,
    output: Output,
    ends: Markers = NO_MARKERS,
    *,
    known: bool = False,
    untagged: bool = False,
    inner: bool = False,
    name_key: str = "name",
) -> Reading[None]:
    """Parse one tool call that is a JSON object.

    Arguments are streamed if they follow the tool's name. Otherwise, they are added to `output` at the end of the call.

    Args:
        ends: markers that end the call even if brackets are open.
        known: whether only the names of tools in the request are accepted.
        untagged: whether the object is in plain text, without a tag that marks it as a tool call. In this case, the
            object must have `arguments` and the name of a tool in the request. Before the arguments, only the keys
            `name`, `id` and `type` are allowed.
        inner: whether the object is the member `function` of another object.
        name_key: key of the tool's name in the format, besides `name`.

    Raises:
        NotACall: the text is not a tool call. If arguments were already added to `output`, the call stays incomplete.
    """
    name: str | None = None
    arguments: str | None = None
    others: dict[str, str] = {}  # JSON texts of other members
    started = False
    yield from source.expect(_OPEN)
    yield from source.space()
    doubled = yield from source.marker(_OPEN)  # some templates show calls with doubled braces
    yield from source.space()
    while not (yield from source.marker(_CLOSE)):
        if started and not (yield from source.upcoming(_QUOTE)):
            break  # the closing brace is missing
        if name is not None and (yield from source.upcoming(ends)):
            break
        key = yield from _key(source, _UNTAGGED_KEYS if untagged and not started else None)
        if key in ("name", name_key) and name is None:
            # Any JSON object in text reaches this line. The attempt to read a call must end at the first sign that the
            # object is no call, so that the text is not delayed.
            if untagged and not (yield from source.upcoming(output.quoted_names)):
                raise NotACall
            name = _loaded_name((yield from read_json_text(source, ends=ends)))
            output.check(name, known=known)
        elif key in _ARGUMENTS and arguments is None:
            if name is not None and (yield from source.peek()) == "{":
                started, arguments = True, ""
                yield from read_arguments(source, output, name, ends)
            # an object in a string whose quotation marks were not escaped
            elif name is not None and (yield from source.upcoming(_QUOTED_OBJECT)):
                source.take(source.at + 1)
                started, arguments = True, ""
                yield from read_arguments(source, output, name, ends)
                yield from source.space()
                yield from source.marker(_QUOTE)
                output.repairs.add("arguments_as_string")
            else:
                arguments = yield from read_json_text(source, ends=ends)
        # The call is an object inside an object, as in OpenAI's API (`function`), or the name has another key.
        elif (
            key in _NAMES
            and (name, arguments) == (None, None)
            and not (untagged or output.structured or output.has(key))
        ):
            if not inner and (yield from source.upcoming(_OPEN)):
                yield from read_call(source, output, ends, known=known, inner=True)
                name, started, arguments = "", True, ""
            else:
                name = _loaded_name((yield from read_json_text(source, ends=ends)))
                output.check(name, known=True)
            output.repairs.add("name_key")
        # The name of the tool is the key of the arguments.
        elif name is None and arguments is None and not (untagged or output.structured) and output.has(key):
            if (yield from source.peek()) != "{":
                raise NotACall
            name, started, arguments = key, True, ""
            output.repairs.add("name_as_key")
            yield from read_arguments(source, output, name, ends)
        # Read other members, also those with a key in `_IGNORED`. They are dropped if the call has arguments. If not,
        # they may themselves be the arguments.
        elif key in _IGNORED or name is not None or arguments is not None:
            others[key] = yield from read_json_text(source, ends=ends)
        else:
            raise NotACall
        yield from source.space()
        separator = (yield from source.marker(_COMMA)) or (yield from source.upcoming(_CLOSE))
        # After arguments have been streamed, a missing separator is accepted, because the call can no longer become
        # text.
        if not (separator or started or (yield from source.upcoming(ends))):
            raise NotACall
        yield from source.space()
    # The arguments came before the name, were a string, or are missing.
    if not started:
        if arguments is None and not others.keys() <= {*_IGNORED}:
            # Small models write the arguments beside the name. `id` and `type` may belong to the call instead.
            parameters = frozenset[str]() if name is None else output.parameters(name)
            if untagged or output.structured or not others.keys() <= {*_IGNORED, *parameters}:
                raise NotACall
            flat = [(key, text) for key, text in others.items() if key in parameters and text != '"function"']
            arguments = f"{{{', '.join(f'{dumps(key)}: {text}' for key, text in flat)}}}"
            output.repairs.add("flat_arguments")
        if untagged and None in (name, arguments):
            raise NotACall
        name, arguments = _repair(output, name, arguments)
        output.check(name, known=known)
        output.start(name)
        output.arguments(arguments)
        output.end()
    if doubled:
        output.repairs.add("doubled_brace")
    source.settle()


def take_surplus(source: Source, limit: int | None = None) -> Reading[None]:
    """Read white space and up to `limit` (default 3) surplus braces after a tool call."""
    yield from source.space()
    for _ in range(limit or _MAX_SURPLUS):
        if not (yield from source.marker(_CLOSE)):
            return
        yield from source.space()


def _key(source: Source, beginnings: Markers | None) -> Reading[str]:
    """Read a key of a JSON object (maybe without quotes) and a colon; return the key."""
    if beginnings is not None and not (yield from source.upcoming(beginnings)):
        raise NotACall
    if quote := (yield from source.marker(_QUOTE)):
        key = yield from source.key(quote)
        yield from source.space()
    else:
        key = (yield from source.short(_COLON, _MAX_BARE_KEY))[0].rstrip()
        if not key.isidentifier():
            raise NotACall
    yield from source.expect(_COLON)
    yield from source.space()
    return key


def _loaded_name(text: str) -> str:
    name = json.loads(text)
    if not isinstance(name, str):
        raise NotACall
    return name


def _repair(output: Output, name: str | None, arguments: str | None) -> tuple[str, str]:
    """Return the tool name and the arguments' JSON text of a call in malformed JSON."""
    arguments = "null" if arguments is None else arguments
    try:
        value: Any = json.loads(arguments)
        # arguments that were encoded as JSON twice
        if isinstance(value, str):
            output.repairs.add("arguments_as_string")
            arguments = repaired_json(value, _schema(output, name)) if value.strip() else "null"
            value = strict_loads(arguments)
            arguments = dumps(value)
        # arguments that are a single object in a list
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
            arguments = dumps(value)
        # missing or null arguments, as for a tool without parameters
        if value is None:
            value, arguments = {}, "{}"
        # The model wrote the name among the arguments. Only a known tool's name shows that it is the call's name.
        if isinstance(value, dict) and name is None:
            name = value.pop("name", None)
            arguments = dumps(value)
            output.check(name if isinstance(name, str) else "", known=True)
    except (ValueError, RecursionError):  # invalid JSON, or a value that cannot be serialized
        raise NotACall from None
    if not isinstance(value, dict) or not isinstance(name, str):
        raise NotACall
    return name, repaired_json(arguments, output.schema(name))


def _schema(output: Output, name: str | None) -> Mapping[str, Any]:
    return {} if name is None else output.schema(name)
