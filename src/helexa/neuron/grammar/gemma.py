"""Build grammars of tool calls in Gemma 4's format (see `parsers.formats.gemma4`)."""

import json
import re
from collections.abc import Mapping
from typing import Any

from helexa.neuron.grammar.rules import Rules, literal, without
from helexa.neuron.grammar.schema_adaptation import type_names
from helexa.neuron.grammar.single_call import CallableTool
from helexa.neuron.parsers.argument_values import has_type
from helexa.neuron.parsers.formats.gemma4 import QUOTE
from helexa.neuron.parsers.json_schema import resolved, with_definitions

_KEY = re.compile(r"[\w./-]{1,128}")
# Keywords that need no grammar: annotations, the type (see `type_names`), and definitions (see `resolved`).
_ANNOTATIONS = frozenset({"type", "title", "description", "default", "examples", "$schema", "$defs", "definitions"})
_MAX_RULES = 500  # maximum number of rules per tool, because recursive definitions need infinitely many


def gemma_call(rules: Rules, tool: CallableTool) -> str:
    """Return a Lark expression for `call:NAME{KEY:VALUE,...}`.

    If the values in Gemma's format cannot enforce the tool's schema, the expression has a JSON object after the name.
    The parser of Gemma's format accepts such calls, too.
    """
    lead = literal(f"call:{tool.name}")
    try:
        return f"{lead} {_Values(rules, tool).object(tool.schema)}"
    except _NotExactError:
        return f"{lead} {tool.arguments(rules)}"


class _NotExactError(Exception):
    """Values in Gemma's format cannot enforce the schema."""


class _Values:
    """Builds the grammars of the values of one tool's arguments."""

    def __init__(self, rules: Rules, tool: CallableTool) -> None:
        self._rules, self._tool = rules, tool
        self._count = 0

    def object(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for an object with the properties of `schema`.

        The properties are sorted by name, as in Gemma's chat template.

        Raises:
            _NotExactError: values in Gemma's format cannot enforce the schema.
        """
        properties, required = schema.get("properties", {}), schema.get("required", [])
        valid = isinstance(properties, Mapping) and isinstance(required, list)
        if not valid or not all(isinstance(name, str) and name in properties for name in required):
            raise _NotExactError
        self._require(schema, "properties", "required", "additionalProperties")
        if schema.get("additionalProperties", False) is not False or not all(map(_KEY.fullmatch, properties)):
            raise _NotExactError
        later = ""  # rule for the properties after the first property in the call
        first: list[str] = []  # alternatives for the first property in the call
        optional = True
        # From the last property to the first, because each rule refers to the rule of the properties after it.
        for name in sorted(properties, key=str.lower, reverse=True):
            written = self._add(f"{literal(f'{name}:')} {self._value(properties[name])}")
            if name in required:
                first, optional = [], False
            first.append(f"{written} {later}")
            another = f'"," {written}' if name in required else f'("," {written})?'
            later = self._add(f"{another} {later}")
        inside = f"({' | '.join(first)}){'?' if optional else ''}" if first else ""
        return f'"{{" {inside} "}}"'

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            raise _NotExactError
        schema = resolved(with_definitions(schema, self._tool.schema))
        names = type_names(schema)
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(options, list) and options:
            self._require(schema, "const", "enum")
            return f"({' | '.join(self._option(option, names) for option in options)})"
        if not names:
            raise _NotExactError
        return f"({' | '.join(self._of_type(name, schema) for name in sorted(names))})"

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> str:
        if name == "string":
            self._require(schema)
            text = self._rules.add("GEMMA_TEXT", without((QUOTE,)))
            return f"{self._rules.marker(QUOTE)} {self._rules.text_to('', QUOTE, text)}"
        if name == "array":
            self._require(schema, "items")
            item = self._add(self._value(schema.get("items")))
            return f'"[" ({item} ("," {item})*)? "]"'
        if name == "object":
            return self.object(schema)
        self._count += 1
        only = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")} | {"type": name}
        label = f"tool_{self._tool.index}_scalar_{self._count}"
        return self._rules.schema(label, only, spaced=True, lenient=not self._tool.strict)

    def _option(self, option: Any, names: frozenset[str]) -> str:
        if isinstance(option, dict | list) or (names and not any(_is(option, name) for name in names)):
            raise _NotExactError
        if not isinstance(option, str):
            return literal(json.dumps(option))
        if QUOTE in option:
            raise _NotExactError
        quote = self._rules.marker(QUOTE)
        return f"{quote} {literal(option) if option else ''} {quote}"

    def _require(self, schema: Mapping[str, Any], *keywords: str) -> None:
        """Raise a _NotExactError if `schema` has other keywords than `keywords`."""
        if schema.keys() - _ANNOTATIONS - set(keywords):
            raise _NotExactError

    def _add(self, body: str) -> str:
        self._count += 1
        if self._count > _MAX_RULES:
            raise _NotExactError
        return self._rules.add(f"tool_{self._tool.index}_gemma_{self._count}", body)


def _is(option: Any, name: str) -> bool:
    return isinstance(option, str) if name == "string" else has_type(option, name)
