"""Describe a tool for a grammar: its name, its arguments' schema, and whether the schema is enforced strictly."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.grammar.rules import Rules
from helexa.neuron.grammar.schema import checked_schema

# With these keywords, properties may exist that `properties` does not mention.
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"})
_OPEN |= {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas", "minProperties"}
_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class Offer:
    """A tool that the grammar allows the model to call.

    Attributes:
        index: position in the request's list of tools.
        name: name of the tool.
        schema: JSON Schema of the arguments.
        strict: enforce the whole schema. If False, the grammar ignores keywords that llguidance cannot enforce.
    """

    index: int
    name: str
    schema: Mapping[str, Any]
    strict: bool

    def __post_init__(self) -> None:
        """Check the tool's name and schema.

        Raises:
            ApiError: 400: `invalid_grammar` for an invalid name, `invalid_schema` for an invalid schema.
        """
        if not is_name(self.name):
            raise ApiError(400, "invalid_grammar", f"'{self.name[:100]}' cannot be the name of a tool", param="tools")
        checked_schema(self.schema, f"the schema of tool '{self.name}'")

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the tool's named parameters by name, in the schema's order."""
        properties = self.schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        """The names of the tool's required parameters."""
        required = self.schema.get("required")
        return frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset()

    @property
    def is_plain(self) -> bool:
        """Return whether the schema only lists named parameters, so that the arguments can be written one by one."""
        return not self.schema.keys() & (_OPEN - {"additionalProperties"}) and self.required <= self.properties.keys()

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """Schema of the arguments as a JSON object. If the tool's schema names parameters, it allows only these
        parameters.
        """
        schema = {**self.schema, "type": "object"}
        if "properties" in schema and not schema.keys() & _OPEN and self.required <= self.properties.keys():
            schema["additionalProperties"] = False
        return schema

    def arguments(self, rules: Rules) -> str:
        """Add the grammar of the arguments, as a JSON object, to `rules` and return a reference to it."""
        return rules.schema(f"tool_{self.index}", self.arguments_schema, spaced=True, lenient=not self.strict)


def is_name(text: str) -> bool:
    """Return whether the parsers accept `text` as the name of a tool or a parameter."""
    return _NAME.fullmatch(text) is not None
