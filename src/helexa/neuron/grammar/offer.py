"""A tool in a grammar: its name, its arguments' schema, and whether the schema is enforced strictly."""

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
    """A callable tool.

    Attributes:
        index: position in the list of tools.
        name: name of the tool.
        schema: JSON Schema of the arguments.
        strict: enforce the whole schema; otherwise keywords that cannot be enforced are ignored.
    """

    index: int
    name: str
    schema: Mapping[str, Any]
    strict: bool

    def __post_init__(self) -> None:
        """Check name and schema.

        Raises:
            ApiError: 400 `invalid_grammar` or `invalid_schema`.
        """
        if not is_name(self.name):
            raise ApiError(400, "invalid_grammar", f"'{self.name[:100]}' cannot be the name of a tool", param="tools")
        checked_schema(self.schema, f"the schema of tool '{self.name}'")

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the named parameters, in order."""
        properties = self.schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        """The names of required parameters."""
        required = self.schema.get("required")
        return frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset()

    @property
    def is_plain(self) -> bool:
        """Return whether the schema is a plain list of parameters."""
        return not self.schema.keys() & (_OPEN - {"additionalProperties"}) and self.required <= self.properties.keys()

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """Schema of the arguments as a JSON object. If it names parameters, other parameters are not allowed."""
        schema = {**self.schema, "type": "object"}
        if "properties" in schema and not schema.keys() & _OPEN and self.required <= self.properties.keys():
            schema["additionalProperties"] = False
        return schema

    def arguments(self, rules: Rules) -> str:
        """Return a reference to the arguments as a JSON object."""
        return rules.schema(f"tool_{self.index}", self.arguments_schema, spaced=True, lenient=not self.strict)


def is_name(text: str) -> bool:
    """Return whether the parsers accept `text` as the name of a tool or a parameter."""
    return _NAME.fullmatch(text) is not None
