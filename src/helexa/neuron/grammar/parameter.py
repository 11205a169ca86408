"""A parameter in a notation that writes arguments one by one between tags: strings bare, all else as JSON."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from helexa.neuron.grammar.offer import Offer
from helexa.neuron.grammar.rules import Rules, literal, without
from helexa.neuron.grammar.schema import definitions, ends_somewhere, type_names
from helexa.neuron.parsers.schema_types import resolved, with_definitions
from helexa.neuron.parsers.values.json_text import argument_text, dumps

# What restricts a string, or makes something else of a schema altogether.
_RESTRICTING = frozenset({"pattern", "format", "minLength", "maxLength", "enum", "const", "allOf", "not", "if", "$ref"})
_WITHOUT_TEXT = frozenset({"integer", "number", "boolean", "null"})
_PROBES = (("7", '"7"'), ("true", '"true"'), ("[]", '"[]"'), ("{}", '"{}"'))  # read as strings only where these count
_UNTAGGED = "helexa-untagged"


class Parameter:
    """One parameter of a tool.

    Args:
        tags: what would end the value wherever it occurred, all beginning with `<`.

    Attributes:
        kind: how the value is written; `restricted` is bare text of which the schema asks more than can be seen to.
    """

    def __init__(self, offer: Offer, name: str, tags: tuple[str, ...]) -> None:
        self._offer = offer
        self._tags = tags
        self._name = name
        schema = offer.properties[name]
        self._schema = resolved(with_definitions(schema, offer.schema)) if isinstance(schema, Mapping) else {}
        self._options = tuple(self._written_options())
        self.kind: Literal["option", "text", "restricted", "json"] = self._find_kind()

    @property
    def is_exact(self) -> bool:
        """Whether whatever is written is read as a value that the schema accepts."""
        return self.kind in ("option", "text") or (self.kind == "json" and (self._is_bare or self._ends))

    def value(self, rules: Rules, margin: str, tag: str) -> str:
        """What refers to the value and the tag after it, with the same `margin` before the tag as before the value."""
        if self.kind in ("text", "restricted"):
            return rules.text_to(margin, tag, rules.add("VALUE", without(self._tags)))
        if self.kind == "option":
            value = f"({' | '.join(map(literal, self._options))})"
        else:
            value = json_value(rules, self._offer, self._name, self._untagged())
        return f"{value} {literal(margin)} {rules.marker(tag)}"

    def _find_kind(self) -> Literal["option", "text", "restricted", "json"]:
        if self._options:
            return "option"
        if all(argument_text(text, self._schema) == quoted for text, quoted in _PROBES):
            if _has_plain_string(self._schema):
                return "text"
            if self._schema.get("type") != "null":
                return "restricted"
        return "json"

    def _written_options(self) -> Iterable[str]:
        """How the values that the schema lists are written so that they are read as what they are."""
        listed = [self._schema["const"]] if "const" in self._schema else self._schema.get("enum")
        for option in listed if isinstance(listed, list) else ():
            for text in (option, json.dumps(option, ensure_ascii=False)):
                if (
                    isinstance(text, str)
                    and text
                    and not any(tag in text for tag in self._tags)
                    and argument_text(text, self._schema) == dumps(option)
                ):
                    yield text
                    break

    @property
    def _is_bare(self) -> bool:
        """Whether no text can occur in its JSON."""
        names = type_names(self._schema)
        return bool(names) and names <= _WITHOUT_TEXT

    @property
    def _ends(self) -> bool:
        return ends_somewhere(self._schema, self._offer.schema)

    def _untagged(self) -> dict[str, Any] | None:
        """The schema of JSON in which no string could be taken for a tag; None where none can occur.

        llguidance cannot intersect schemas that refer to themselves; those are left as they are.
        """
        if self._is_bare or not self._ends:
            return None
        text = f"^([^<]|<+[^<{''.join(sorted({tag[1] for tag in self._tags}))}])*<*$"
        again = {"$ref": f"#/$defs/{_UNTAGGED}"}
        return {
            "anyOf": [
                {"type": ["null", "boolean", "number"]},
                {"type": "string", "pattern": text},
                {"type": "array", "items": again},
                {"type": "object", "patternProperties": {text: again}, "additionalProperties": False},
            ]
        }


def json_value(rules: Rules, offer: Offer, name: str, limit: Mapping[str, Any] | None = None) -> str:
    """What refers to the value of a tool's parameter as JSON, which must be of the schema `limit` too."""
    schema = offer.properties[name]
    defined = definitions(offer.schema)
    if limit is not None:
        defined["$defs"] = {**defined.get("$defs", {}), _UNTAGGED: limit}
        schema = {"allOf": [schema, {"$ref": f"#/$defs/{_UNTAGGED}"}]} | defined
    elif isinstance(schema, Mapping):
        schema = dict(schema) | defined
    number = list(offer.properties).index(name)
    return rules.schema(f"tool_{offer.index}_parameter_{number}", schema, spaced=True, lenient=not offer.strict)


def _has_plain_string(schema: Any, depth: int = 4) -> bool:
    """Whether any string will do."""
    if not isinstance(schema, Mapping) or schema.keys() & _RESTRICTING or not depth:
        return False
    if names := type_names(schema):
        return "string" in names and not schema.keys() & {"anyOf", "oneOf"}
    branches = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    return any(_has_plain_string(branch, depth - 1) for listed in branches for branch in listed)
