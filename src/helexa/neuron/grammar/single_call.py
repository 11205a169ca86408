"""Build the grammar of one tool call, with one function for each syntax.

The functions add rules to a grammar, and return a Lark expression that matches the call.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from helexa.core.errors import ApiError
from helexa.neuron.grammar.rules import Rules, literal, without
from helexa.neuron.grammar.schema_adaptation import (
    allows_nothing,
    checked_schema,
    definitions,
    ends_somewhere,
    type_names,
)
from helexa.neuron.parsers.argument_values import argument_text, dumps
from helexa.neuron.parsers.formats.tagged_calls import CallTags
from helexa.neuron.parsers.json_schema import resolved, with_definitions

# With these keywords, an object may have properties that the keyword `properties` does not list.
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"})
_OPEN |= {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas", "minProperties"}
_NAME = re.compile(r"[\w.:/-]{1,128}")

# Keywords that restrict a string, or change the meaning of a schema.
_RESTRICTING = frozenset({"pattern", "format", "minLength", "maxLength", "enum", "const", "allOf", "not", "if", "$ref"})
_WITHOUT_TEXT = frozenset({"integer", "number", "boolean", "null"})
# Each entry has the text of an argument, and the text as a JSON string. If the schema allows no strings, but more than
# null, the parser converts at least one of these texts to another JSON value.
_PROBES = (("7", '"7"'), ("true", '"true"'), ("[]", '"[]"'), ("{}", '"{}"'))
_UNTAGGED = "helexa-untagged"  # key in `$defs` of the schema that forbids tags in strings


@dataclass(frozen=True)
class CallableTool:
    """A tool that the grammar allows the model to call."""

    index: int  # position in the request's list of tools
    name: str
    schema: Mapping[str, Any]  # JSON Schema of the arguments
    # Whether to enforce the whole schema. If False, the grammar ignores keywords that llguidance cannot enforce.
    strict: bool

    def __post_init__(self) -> None:
        """Raise an ApiError (400) if the name or the schema of the tool is invalid."""
        if not is_name(self.name):
            raise ApiError(
                400,
                "invalid_grammar",
                f"'{self.name[:100]}' cannot be the name of a tool; use letters, digits and _.:/-",
                param="tools",
            )
        checked_schema(self.schema, f"the schema of tool '{self.name}'")

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the tool's parameters by parameter name, in the schema's order."""
        properties = self.schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        """The names of the tool's required parameters."""
        required = self.schema.get("required")
        return frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset()

    @property
    def parameters(self) -> list[str]:
        """The names in `properties`, without optional parameters that no value matches."""
        required = self.required
        return [name for name, schema in self.properties.items() if name in required or not allows_nothing(schema)]

    @property
    def is_plain(self) -> bool:
        """Whether the schema only lists named parameters, besides `additionalProperties`.

        The arguments can then be written one by one, without a JSON object around them.
        """
        return not self.schema.keys() & (_OPEN - {"additionalProperties"}) and self.required <= self.properties.keys()

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """JSON Schema of a call's arguments, which forbids undeclared parameters.

        Undeclared parameters stay allowed if the tool's schema lacks `properties`, requires an undeclared parameter, or
        has keywords for additional parameters.
        """
        schema = {**self.schema, "type": "object"}
        if "properties" in schema and not schema.keys() & _OPEN and self.required <= self.properties.keys():
            schema["additionalProperties"] = False
        return schema

    def arguments(self, rules: Rules) -> str:
        """Add the arguments' schema to `rules`. Return an expression that refers to it."""
        return rules.schema(f"tool_{self.index}", self.arguments_schema, spaced=True, lenient=not self.strict)


def is_name(text: str) -> bool:
    """Return whether parsers accept `text` as the name of a tool or a parameter."""
    return _NAME.fullmatch(text) is not None


class Parameter:
    """Builds the grammar of one tool parameter that is written between tags."""

    def __init__(self, tool: CallableTool, name: str, tags: tuple[str, ...]) -> None:
        self._tool = tool
        self._tags = tags  # strings that would end the value; all begin with `<`
        self._name = name
        schema = tool.properties[name]
        self._schema = resolved(with_definitions(schema, tool.schema)) if isinstance(schema, Mapping) else {}
        self._options = tuple(self._written_options())
        # Syntax of the value. `option`: one of the values that the schema lists. `text`: any string, without quotes.
        # `restricted`: a string without quotes, if the schema has restrictions that the grammar cannot enforce. `json`:
        # JSON.
        self.kind: Literal["option", "text", "restricted", "json"] = self._find_kind()

    @property
    def is_exact(self) -> bool:
        """Whether the schema accepts each value that the grammar lets the model write."""
        return self.kind in ("option", "text") or (self.kind == "json" and (self._is_bare or self._ends))

    def value(self, rules: Rules, margin: str, tag: str) -> str:
        """Return a Lark expression for the value, `margin` and the closing tag."""
        if self.kind in ("text", "restricted"):
            return rules.text_to(margin, tag, rules.add("VALUE", without(self._tags)))
        if self.kind == "option":
            value = f"({' | '.join(map(literal, self._options))})"
        else:
            value = json_value(rules, self._tool, self._name, self._untagged())
        return f"{value} {literal(margin) if margin else ''} {rules.marker(tag)}"

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
        """Yield a text for each `enum` or `const` value that parsers can read back."""
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
        """Whether JSON writes all values of the schema without quotes."""
        names = type_names(self._schema)
        return bool(names) and names <= _WITHOUT_TEXT

    @property
    def _ends(self) -> bool:
        return ends_somewhere(self._schema, self._tool.schema)

    def _untagged(self) -> dict[str, Any] | None:
        """Return a JSON Schema that forbids tags in strings, or None if not needed."""
        # Also return None if the parameter's schema is recursive: llguidance cannot intersect recursive schemas.
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

    The value must also match the JSON Schema `limit`, unless `limit` is None.
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
    """Return whether `schema` allows every string: no `pattern` or other restriction."""
    if not isinstance(schema, Mapping) or schema.keys() & _RESTRICTING or not depth:
        return False
    if names := type_names(schema):
        return "string" in names and not schema.keys() & {"anyOf", "oneOf"}
    branches = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    return any(_has_plain_string(branch, depth - 1) for listed in branches for branch in listed)


def json_call(rules: Rules, tool: CallableTool) -> str:
    """Return a Lark expression for a call as `{"name": ..., "arguments": {...}}`."""
    lead = f'{{"name": "{tool.name}", "arguments": '
    return f'{literal(lead)} {tool.arguments(rules)} "}}"'


def cohere_call(rules: Rules, tool: CallableTool) -> str:
    """Return a Lark expression for a call of Cohere's models, with the call's number."""
    number, lead = '{"tool_call_id": "', f'", "tool_name": "{tool.name}", "parameters": '
    return f'{literal(number)} /[0-9]{{1,3}}/ {literal(lead)} {tool.arguments(rules)} "}}"'


def command_r_call(rules: Rules, tool: CallableTool) -> str:
    """Return a Lark expression for a call of Command R, one line per member."""
    lead = f'{{\n        "tool_name": "{tool.name}",\n        "parameters": '
    return f"{literal(lead)} {tool.arguments(rules)} {literal(chr(10) + '    }')}"


def schema_call(rules: Rules, tool: CallableTool, key: str) -> str:
    """Return a Lark expression for a call as `{"name": ..., KEY: {...}}`."""
    # The whole call is one JSON Schema, so a grammar can allow other JSON text as an alternative to the call.
    schema = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: _moved(tool.arguments_schema, f"#/properties/{key}")},
        "required": ["name", key],
        "additionalProperties": False,
    }
    return rules.schema(f"tool_{tool.index}", schema, spaced=True, lenient=not tool.strict)


def tagged_call(rules: Rules, tool: CallableTool, tags: CallTags) -> str:
    """Return a Lark expression for a call with tagged parameters.

    If this form cannot enforce the tool's schema, the expression is that of `json_call`.
    """
    bare = bare_tagged_call(rules, tool, tags)
    lead = f"{literal(tags.call)} " if tags.call else ""
    return f"{lead}{bare}" if bare else json_call(rules, tool)


def bare_tagged_call(rules: Rules, tool: CallableTool, tags: CallTags) -> str:
    """Return the expression of `tagged_call` without the leading `tags.call`.

    The result is empty if tagged parameters cannot enforce the tool's schema.
    """
    parameters = {name: Parameter(tool, name, tags.inside_values) for name in tool.parameters}
    if not (tool.is_plain and all(is_name(name) and parameter.is_exact for name, parameter in parameters.items())):
        return ""
    # GLM 4.6 writes each tag in a line of its own, GLM 4.7 writes no line breaks.
    line = literal("\n") if tags.call else '"\\n"?'
    margin = "\n" if tags.lines else ""
    items = [literal(tool.name + tags.name_end), line]
    for name, parameter in parameters.items():
        lead = f"{rules.marker(tags.key)} {literal(name)} {rules.marker(tags.key_end)}"
        if tags.value:
            lead += f" {line} {rules.marker(tags.value)}"
        if margin:
            lead += f" {literal(margin)}"
        tagged = f"{lead} {parameter.value(rules, margin, tags.value_end)} {line}"
        items.append(tagged if name in tool.required else f"({tagged})?")
    return " ".join([*items, literal(tags.call_end)] if tags.call_end else items)


def python_call(rules: Rules, tool: CallableTool) -> str:
    """Return a Lark expression for a call as `NAME(KEY=VALUE, ...)`, values in JSON.

    Optional parameters are left out if no value matches them, or if their names cannot be written (see `is_name`).

    Raises:
        ApiError: 400 `unsupported_schema`: this form cannot express a required parameter, or the schema of a strict
            tool.
    """
    number = f"tool_{tool.index}"
    later = ""  # rule for the parameters after the first one in the call
    first: list[str] = []  # alternatives for the first parameter in the call
    optional = True
    # From the last parameter to the first, because each rule refers to the rule of the parameters after it.
    for position, name in reversed([*enumerate(_writable(tool, tool.parameters))]):
        written = rules.add(f"{number}_{position}", f"{literal(f'{name}=')} {json_value(rules, tool, name)}")
        if name in tool.required:
            first, optional = [], False
        first.append(f"{written} {later}")
        another = f'", " {written}' if name in tool.required else f'(", " {written})?'
        later = rules.add(f"{number}_after_{position}", f"{another} {later}")
    inside = f"({' | '.join(first)}){'?' if optional else ''}" if first else ""
    return f'{literal(f"{tool.name}(")} {inside} ")"'


def _moved(schema: Any, place: str) -> Any:
    """Return a copy of `schema` whose local references (`#...`) begin with `place`."""
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
    """Return those of `names` that can be written as a parameter name in a call."""
    if tool.strict and not tool.is_plain:
        raise _unsupported(tool, "its parameters must be a schema with 'type': 'object' and 'properties'")
    written = [name for name in names if is_name(name)]
    if missing := sorted(tool.required.intersection(names).difference(written)):
        raise _unsupported(tool, f"rename its parameter '{missing[0][:100]}', which cannot be written")
    return written


def _unsupported(tool: CallableTool, reason: str) -> ApiError:
    message = f"tool '{tool.name}': {reason} in this model's tool-call format"
    return ApiError(400, "unsupported_schema", message, param="tools")
