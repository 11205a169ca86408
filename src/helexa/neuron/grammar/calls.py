"""Build the grammar of one tool call, with one function for each tool-call syntax.

The functions add rules to a grammar, and return a Lark expression that matches the call.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.grammar.callable_tool import CallableTool, is_name
from helexa.neuron.grammar.parameter import Parameter, json_value
from helexa.neuron.grammar.rules import Rules, literal

_XML_TAGS = ("</parameter>", "<parameter=", "</function>", "</tool_call>")
_FUNCTION, _LINE = "<function=", "\n"


def json_call(rules: Rules, tool: CallableTool) -> str:
    """Return a Lark expression for a call of `tool` in the form `{"name": ..., "arguments": {...}}`."""
    lead = f'{{"name": "{tool.name}", "arguments": '
    return f'{literal(lead)} {tool.arguments(rules)} "}}"'


def schema_call(rules: Rules, tool: CallableTool, key: str) -> str:
    """Return a Lark expression for a call of `tool` in the form `{"name": ..., KEY: {...}}`.

    KEY is the argument `key`, and its value contains the arguments of the call. The whole call is one JSON Schema, so a
    grammar can allow other JSON text as an alternative to the call.
    """
    schema = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: _moved(tool.arguments_schema, f"#/properties/{key}")},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return rules.schema(f"tool_{tool.index}", schema, spaced=True, lenient=not tool.strict)


def xml_call(rules: Rules, tool: CallableTool) -> str:
    """Return a Lark expression for a call of `tool` in the form `<function=NAME>` with tagged parameters.

    If the tagged form cannot enforce the tool's schema, the grammar requires the JSON form of `json_call` instead.
    """
    bare = bare_xml_call(rules, tool)
    return f"{literal(_FUNCTION)} {bare}" if bare else json_call(rules, tool)


def bare_xml_call(rules: Rules, tool: CallableTool) -> str:
    """Return a Lark expression for the text after `<function=` in the form of `xml_call`.

    Return "" if this form cannot enforce the tool's schema.
    """
    parameters = {name: Parameter(tool, name, _XML_TAGS) for name in tool.properties}
    if not (tool.is_plain and all(is_name(name) and parameter.is_exact for name, parameter in parameters.items())):
        return ""
    items = [literal(f"{tool.name}>\n")]
    for name, parameter in parameters.items():
        value = parameter.value(rules, _LINE, "</parameter>")
        tagged = f"{literal(f'<parameter={name}>' + _LINE)} {value} {literal(_LINE)}"
        items.append(tagged if name in tool.required else f"({tagged})?")
    return " ".join([*items, literal("</function>")])


def python_call(rules: Rules, tool: CallableTool) -> str:
    """Return a Lark expression for a call of `tool` in the form `NAME(KEY=VALUE, ...)` with values in JSON.

    Raises:
        ApiError: 400 `unsupported_schema`: this form cannot express a required parameter, or the schema of a strict
            tool.
    """
    number = f"tool_{tool.index}"
    later = ""  # rule for the parameters after the first one in the call
    first: list[str] = []  # alternatives for the first parameter in the call
    optional = True
    for position, name in reversed([*enumerate(_writable(tool, tool.properties))]):
        written = rules.add(f"{number}_{position}", f"{literal(f'{name}=')} {json_value(rules, tool, name)}")
        if name in tool.required:
            first, optional = [], False
        first.append(f"{written} {later}")
        another = f'", " {written}' if name in tool.required else f'(", " {written})?'
        later = rules.add(f"{number}_after_{position}", f"{another} {later}")
    inside = f"({' | '.join(first)}){'?' if optional else ''}" if first else ""
    return f'{literal(f"{tool.name}(")} {inside} ")"'


def _moved(schema: Any, place: str) -> Any:
    """Return a copy of `schema` for use inside another schema, at the JSON pointer `place`.

    Each local reference (`#...`) in the copy is prefixed with `place`, so it still points to the same subschema.
    """
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _writable(tool: CallableTool, names: Iterable[str]) -> list[str]:
    """Return the names in `names` that are valid parameter names in a call.

    Raises:
        ApiError: 400 `unsupported_schema`: a required parameter has an invalid name, or the tool is strict and its
            schema is not a plain list of parameters.
    """
    if tool.strict and not tool.is_plain:
        raise _unsupported(tool, "its schema must be an object's with 'properties'")
    written = [name for name in names if is_name(name)]
    if missing := sorted(tool.required.intersection(names).difference(written)):
        raise _unsupported(tool, f"its parameter '{missing[0][:100]}' cannot be written")
    return written


def _unsupported(tool: CallableTool, reason: str) -> ApiError:
    message = f"tool '{tool.name}': {reason} in this model's tool-call format"
    return ApiError(400, "unsupported_schema", message, param="tools")
