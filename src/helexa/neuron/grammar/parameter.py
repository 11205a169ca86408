"""Grammar of a tool parameter between tags. Strings are written without quotes, other values as JSON."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from helexa.neuron.grammar.callable_tool import CallableTool
from helexa.neuron.grammar.rules import Rules, literal, without
from helexa.neuron.grammar.schema import definitions, ends_somewhere, type_names
from helexa.neuron.parsers.schema_types import resolved, with_definitions
from helexa.neuron.parsers.values.json_text import argument_text, dumps

# Keywords that restrict a string, or change the meaning of a schema.
_RESTRICTING = frozenset({"pattern", "format", "minLength", "maxLength", "enum", "const", "allOf", "not", "if", "$ref"})
_WITHOUT_TEXT = frozenset({"integer", "number", "boolean", "null"})
# The parser reads these texts as strings only if the schema's type is string.
_PROBES = (("7", '"7"'), ("true", '"true"'), ("[]", '"[]"'), ("{}", '"{}"'))
_UNTAGGED = "helexa-untagged"


class Parameter:
    """Builds the grammar of one tool parameter that is written between tags.

    Args:
        tool: the tool.
        name: name of the parameter.
        tags: strings that would end the value; all begin with `<`.

    Attributes:
        kind: syntax of the value. `option`: one of the values that the schema lists. `text`: any string, without
            quotes. `restricted`: a string without quotes, if the schema has restrictions that the grammar cannot
            enforce. `json`: JSON.
    """

    def __init__(self, tool: CallableTool, name: str, tags: tuple[str, ...]) -> None:
        self._tool = tool
        self._tags = tags
        self._name = name
        schema = tool.properties[name]
        self._schema = resolved(with_definitions(schema, tool.schema)) if isinstance(schema, Mapping) else {}
        self._options = tuple(self._written_options())
        self.kind: Literal["option", "text", "restricted", "json"] = self._find_kind()

    @property
    def is_exact(self) -> bool:
        """Whether the schema accepts each value that the tool-call parser reads from text that matches the grammar."""
        return self.kind in ("option", "text") or (self.kind == "json" and (self._is_bare or self._ends))

    def value(self, rules: Rules, margin: str, tag: str) -> str:
        """Return a Lark expression for the value, followed by the string `margin` and the closing tag `tag`."""
        if self.kind in ("text", "restricted"):
            return rules.text_to(margin, tag, rules.add("VALUE", without(self._tags)))
        if self.kind == "option":
            value = f"({' | '.join(map(literal, self._options))})"
        else:
            value = json_value(rules, self._tool, self._name, self._untagged())
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
        """Yield the text of each value that the schema lists in `const` or `enum`.

        A value is omitted if the tool-call parser would not turn its text back into the same value.
        """
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
        """Whether the schema allows only values that JSON writes without quotes: numbers, booleans and null."""
        names = type_names(self._schema)
        return bool(names) and names <= _WITHOUT_TEXT

    @property
    def _ends(self) -> bool:
        return ends_somewhere(self._schema, self._tool.schema)

    def _untagged(self) -> dict[str, Any] | None:
        """Return a schema that allows only JSON whose strings contain no tags, to combine with the parameter's schema.

        Return None if the value contains no strings. Also return None if the parameter's schema is recursive, because
        llguidance cannot intersect recursive schemas.
        """
        if self._is_bare or not self._ends:
            return None
        text = f"^([^<]|<+[^<{''.join(sorted({tag[1] for tag in self._tags}))}])*<*$"
        recursive = {"$ref": f"#/$defs/{_UNTAGGED}"}
        return {
            "anyOf": [
                {"type": ["null", "boolean", "number"]},
                {"type": "string", "pattern": text},
                {"type": "array", "items": recursive},
                {"type": "object", "patternProperties": {text: recursive}, "additionalProperties": False},
            ]
        }


def json_value(rules: Rules, tool: CallableTool, name: str, limit: Mapping[str, Any] | None = None) -> str:
    """Return a Lark expression for the parameter `name` of `tool`, written as JSON.

    Args:
        rules: the grammar, to which the parameter's schema is added.
        limit: a JSON Schema that the value must also match; None for no such schema.
    """
    schema = tool.properties[name]
    defined = definitions(tool.schema)
    if limit is not None:
        defined["$defs"] = {**defined.get("$defs", {}), _UNTAGGED: limit}
        schema = {"allOf": [schema, {"$ref": f"#/$defs/{_UNTAGGED}"}]} | defined
    elif isinstance(schema, Mapping):
        schema = dict(schema) | defined
    number = list(tool.properties).index(name)
    return rules.schema(f"tool_{tool.index}_parameter_{number}", schema, spaced=True, lenient=not tool.strict)


def _has_plain_string(schema: Any, depth: int = 4) -> bool:
    """Return whether `schema` allows arbitrary strings, without a restriction such as `pattern`."""
    if not isinstance(schema, Mapping) or schema.keys() & _RESTRICTING or not depth:
        return False
    if names := type_names(schema):
        return "string" in names and not schema.keys() & {"anyOf", "oneOf"}
    branches = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    return any(_has_plain_string(branch, depth - 1) for listed in branches for branch in listed)
