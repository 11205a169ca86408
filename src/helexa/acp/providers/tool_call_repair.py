"""Parses tool calls and repairs frequent format errors of small models.

Ambiguous calls are rejected.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_SURPLUS_BRACES = 3

_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call after `repair`: parsed, but tool and arguments are not checked."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A tool call that `repair` cannot parse; `reason` is an error for the model."""

    reason: str


def repair(name: str, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> ParsedCall | MalformedCall:
    """Parse a tool call, repairing frequent format errors; return it or an error.

    Args:
        name: tool name, or empty if `text` contains the name.
        text: the arguments as JSON. If `name` is empty, the whole call as JSON or as `<function=...>` markup.
        schemas: JSON Schema of each tool's arguments, by tool name.
    """
    text = text.strip()
    if not name and (markup := _FUNCTION.match(text)):
        return _read_markup(markup, schemas)
    if name and not text:
        return ParsedCall(name, {})
    try:
        value = _read_json(text)
    except ValueError as error:
        return MalformedCall(f"the call is not valid JSON: {error}")
    if name:
        return _with_name(name, value)
    return _find_name(value, schemas)


def _with_name(name: str, arguments: Any) -> ParsedCall | MalformedCall:
    if isinstance(arguments, str):  # JSON encoded twice
        try:
            arguments = _read_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            return MalformedCall(f"the arguments are not valid JSON: {error}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return MalformedCall("the arguments are not a JSON object")
    return ParsedCall(name, arguments)


def _find_name(call: Any, schemas: Mapping[str, Mapping[str, Any]]) -> ParsedCall | MalformedCall:
    if isinstance(call, dict) and isinstance(call.get("function"), dict):  # wrapped as in the OpenAI API
        call = call["function"]
    if not isinstance(call, dict):
        return MalformedCall("the call is not a JSON object")
    key = next((key for key in ("arguments", "parameters") if key in call), None)
    arguments = call[key] if key else None
    name = call.get("name")
    if isinstance(name, str) and name:
        return _with_name(name, arguments)
    if isinstance(arguments, dict):
        inner = arguments.get("name")
        if isinstance(inner, str) and inner in schemas and "name" not in _properties(schemas[inner]):
            other_arguments = {key: value for key, value in arguments.items() if key != "name"}
            nested = other_arguments.get("arguments")
            return _with_name(
                inner, nested if len(other_arguments) == 1 and isinstance(nested, dict) else other_arguments
            )
    candidate = arguments if isinstance(arguments, dict) else call if key is None else {}
    matching_tools = list(_matching_tools(candidate, schemas))
    if len(matching_tools) == 1:
        return ParsedCall(matching_tools[0], candidate)
    return MalformedCall("the call does not name a tool")


def _matching_tools(arguments: dict[str, Any], schemas: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the names of the tools for which `arguments` could be meant.

    `arguments` has all required arguments of such a tool and no unknown argument.
    """
    keys = arguments.keys()
    for name, schema in schemas.items():
        if keys and set(schema.get("required", ())) <= keys <= _properties(schema).keys():
            yield name


def _read_markup(markup: re.Match[str], schemas: Mapping[str, Mapping[str, Any]]) -> ParsedCall | MalformedCall:
    name = markup[1].strip().strip("\"'")
    if not name:
        return MalformedCall("the call does not name a tool")
    properties = _properties(schemas.get(name, {}))
    arguments = {
        key.strip().strip("\"'"): _typed(value, properties.get(key.strip().strip("\"'")))
        for key, value in _PARAMETER.findall(markup[2])
    }
    return ParsedCall(name, arguments)


def _typed(text: str, schema: Any) -> Any:
    """Return a markup parameter's value, converted to the type in its JSON schema."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = set(_kinds(schema))
    # Text stays text if the schema allows strings, even if it looks like JSON.
    if "string" in kinds or not kinds:
        return text
    try:
        return json.loads(text.strip().lower() if "boolean" in kinds else text, strict=False)
    except ValueError:
        return text  # `Tool.check` reports the invalid value later


def _kinds(schema: Any) -> Iterable[str]:
    if not isinstance(schema, Mapping):
        return
    kind = schema.get("type")
    yield from (kind,) if isinstance(kind, str) else kind if isinstance(kind, list) else ()
    for keyword in ("anyOf", "oneOf"):
        for alternative in schema.get(keyword) or ():
            yield from _kinds(alternative)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _read_json(text: str) -> Any:
    """Return parsed JSON. Raw line breaks and up to three extra `}` are accepted."""
    try:
        value, end = json.JSONDecoder(strict=False, parse_constant=_reject_constant).raw_decode(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    surplus = "".join(text[end:].split())
    if surplus.strip("}") or len(surplus) > MAX_SURPLUS_BRACES:
        raise ValueError(f"unexpected text after the end of the JSON value: {surplus[:20]!r}")
    return value


def _reject_constant(constant: str) -> None:
    raise ValueError(f"the JSON contains {constant}, which is not a JSON value; write a number or null")
