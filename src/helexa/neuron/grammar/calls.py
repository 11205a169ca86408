"""Build the grammar of one tool call, with one function for each tool-call syntax.

The functions add rules to a grammar, and return a Lark expression that matches the call.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.grammar.offer import Offer, is_name
from helexa.neuron.grammar.parameter import Parameter, json_value
from helexa.neuron.grammar.rules import Rules, literal

_XML_TAGS = ("</parameter>", "<parameter=", "</function>", "</tool_call>")
_LINE = "\n"


def json_call(rules: Rules, offer: Offer) -> str:
    """Return a Lark expression for a call of the tool `offer` in the form `{"name": ..., "arguments": {...}}`."""
    lead = f'{{"name": "{offer.name}", "arguments": '
    return f'{literal(lead)} {offer.arguments(rules)} "}}"'


def schema_call(rules: Rules, offer: Offer, key: str) -> str:
    """Return a Lark expression for a call of the tool `offer` in the form `{"name": ..., KEY: {...}}`.

    KEY is the argument `key`, and its value contains the arguments of the call. The whole call is one JSON Schema, so a
    grammar can allow other JSON text as an alternative to the call.
    """
    schema = {
        "type": "object",
        "properties": {"name": {"const": offer.name}, key: _moved(offer.arguments_schema, f"#/properties/{key}")},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return rules.schema(f"tool_{offer.index}", schema, spaced=True, lenient=not offer.strict)


def xml_call(rules: Rules, offer: Offer) -> str:
    """Return a Lark expression for a call of the tool `offer` in the form `<function=NAME>` with tagged parameters.

    If the tagged form cannot enforce the tool's schema, the grammar requires the JSON form of `json_call` instead.
    """
    parameters = {name: Parameter(offer, name, _XML_TAGS) for name in offer.properties}
    if not (offer.is_plain and all(is_name(name) and parameter.is_exact for name, parameter in parameters.items())):
        return json_call(rules, offer)
    items = [literal(f"<function={offer.name}>\n")]
    for name, parameter in parameters.items():
        value = parameter.value(rules, _LINE, "</parameter>")
        tagged = f"{literal(f'<parameter={name}>' + _LINE)} {value} {literal(_LINE)}"
        items.append(tagged if name in offer.required else f"({tagged})?")
    return " ".join([*items, literal("</function>")])


def python_call(rules: Rules, offer: Offer) -> str:
    """Return a Lark expression for a call of the tool `offer` in the form `NAME(KEY=VALUE, ...)` with values in JSON.

    Raises:
        ApiError: 400 `unsupported_schema`: this form cannot express a required parameter, or the schema of a strict
            tool.
    """
    number = f"tool_{offer.index}"
    later = ""  # rule for the parameters after the first one in the call
    first: list[str] = []  # alternatives for the first parameter in the call
    optional = True
    for position, name in reversed([*enumerate(_writable(offer, offer.properties))]):
        written = rules.add(f"{number}_{position}", f"{literal(f'{name}=')} {json_value(rules, offer, name)}")
        if name in offer.required:
            first, optional = [], False
        first.append(f"{written} {later}")
        another = f'", " {written}' if name in offer.required else f'(", " {written})?'
        later = rules.add(f"{number}_after_{position}", f"{another} {later}")
    inside = f"({' | '.join(first)}){'?' if optional else ''}" if first else ""
    return f'{literal(f"{offer.name}(")} {inside} ")"'


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


def _writable(offer: Offer, names: Iterable[str]) -> list[str]:
    """Return the names in `names` that are valid parameter names in a call.

    Raises:
        ApiError: 400 `unsupported_schema`: a required parameter has an invalid name, or the tool is strict and its
            schema is not a plain list of parameters.
    """
    if offer.strict and not offer.is_plain:
        raise _unsupported(offer, "its schema must be an object's with 'properties'")
    written = [name for name in names if is_name(name)]
    if missing := sorted(offer.required.intersection(names).difference(written)):
        raise _unsupported(offer, f"its parameter '{missing[0][:100]}' cannot be written")
    return written


def _unsupported(offer: Offer, reason: str) -> ApiError:
    message = f"tool '{offer.name}': {reason} in this model's tool-call format"
    return ApiError(400, "unsupported_schema", message, param="tools")
