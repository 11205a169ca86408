"""One call of a tool, in the ways that families write it."""

from collections.abc import Iterable, Mapping
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.grammar.offer import Offer, is_name
from helexa.neuron.grammar.parameter import Parameter, json_value
from helexa.neuron.grammar.rules import Rules, literal

_XML_TAGS = ("</parameter>", "<parameter=", "</function>", "</tool_call>")
_LINE = "\n"


def json_call(rules: Rules, offer: Offer) -> str:
    """`{"name": ..., "arguments": {...}}`."""
    lead = f'{{"name": "{offer.name}", "arguments": '
    return f'{literal(lead)} {offer.arguments(rules)} "}}"'


def schema_call(rules: Rules, offer: Offer, key: str) -> str:
    """`{"name": ..., KEY: {...}}`, all of it JSON of one schema: so that JSON that is no call may stand there too."""
    whole = {
        "type": "object",
        "properties": {"name": {"const": offer.name}, key: _moved(offer.arguments_schema, f"#/properties/{key}")},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return rules.schema(f"tool_{offer.index}", whole, spaced=True, lenient=not offer.strict)


def xml_call(rules: Rules, offer: Offer) -> str:
    """`<function=NAME>` with tagged parameters, or JSON where the tool's schema asks for what tags cannot show."""
    parameters = {name: Parameter(offer, name, _XML_TAGS) for name in offer.properties}
    if not (offer.is_plain and all(is_name(name) and one.is_exact for name, one in parameters.items())):
        return json_call(rules, offer)
    parts = [literal(f"<function={offer.name}>\n")]
    for name, parameter in parameters.items():
        value = parameter.value(rules, _LINE, "</parameter>")
        tagged = f"{literal(f'<parameter={name}>' + _LINE)} {value} {literal(_LINE)}"
        parts.append(tagged if name in offer.required else f"({tagged})?")
    return " ".join([*parts, literal("</function>")])


def python_call(rules: Rules, offer: Offer) -> str:
    """`NAME(KEY=VALUE, ...)`, with values in JSON.

    Raises:
        ApiError: 400 `unsupported_schema`: a strict tool's schema asks for what this cannot show.
    """
    number = f"tool_{offer.index}"
    later = ""  # what may follow when a parameter is written already
    first: list[str] = []  # what may stand when none is
    optional = True
    for position, name in reversed([*enumerate(_writable(offer, offer.properties))]):
        one = rules.add(f"{number}_{position}", f"{literal(f'{name}=')} {json_value(rules, offer, name)}")
        if name in offer.required:
            first, optional = [], False
        first.append(f"{one} {later}")
        another = f'", " {one}' if name in offer.required else f'(", " {one})?'
        later = rules.add(f"{number}_after_{position}", f"{another} {later}")
    inside = f"({' | '.join(first)}){'?' if optional else ''}" if first else ""
    return f'{literal(f"{offer.name}(")} {inside} ")"'


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references lead from its new place to what they led to."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(part, place) for key, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _writable(offer: Offer, names: Iterable[str]) -> list[str]:
    """Those parameters whose names can be written.

    Raises:
        ApiError: 400 `unsupported_schema`: one that is required cannot, or the strict schema is no list of parameters.
    """
    if offer.strict and not offer.is_plain:
        raise _unsupported(offer, "its schema must be an object's with 'properties'")
    written = [name for name in names if is_name(name)]
    if missing := sorted(offer.required.intersection(names).difference(written)):
        raise _unsupported(offer, f"its parameter '{missing[0][:100]}' cannot be written")
    return written


def _unsupported(offer: Offer, reason: str) -> ApiError:
    message = f"tool '{offer.name}': {reason} in the notation in which this model calls tools"
    return ApiError(400, "unsupported_schema", message, param="tools")
