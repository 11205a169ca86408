"""Describes a tool for a grammar: the name, the schema of the arguments, and whether the whole schema is enforced."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.grammar.rules import Rules
from helexa.neuron.grammar.schema import checked_schema

# With these keywords, an object may have properties that the keyword `properties` does not list.
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"})
_OPEN |= {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas", "minProperties"}
_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class CallableTool:
    """A tool that the grammar allows the model to call.

    Attributes:
        index: position in the request's list of tools.
        name: name of the tool.
        schema: JSON Schema of the arguments.
        strict: whether to enforce the whole schema. If False, the grammar ignores keywords that llguidance cannot
            enforce.
    """

    index: int
    name: str
    schema: Mapping[str, Any]
    strict: bool

    def __post_init__(self) -> None:
        """Raise an error if the tool's name or schema is invalid.

        Raises:
            ApiError: 400 `invalid_grammar`: the name is invalid. 400 `invalid_schema`: the schema is invalid.
        """
        if not is_name(self.name):
            raise ApiError(400, "invalid_grammar", f"'{self.name[:100]}' cannot be the name of a tool", param="tools")
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
    def is_plain(self) -> bool:
        """Whether the schema only lists named parameters, without keywords that allow or restrict other properties.

        The arguments can then be written one by one, without a JSON object around them.
        """
        return not self.schema.keys() & (_OPEN - {"additionalProperties"}) and self.required <= self.properties.keys()

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """Schema of the JSON object that contains all arguments of a call.

        If the tool's schema names parameters and does not mention additional parameters, only the named parameters are
        allowed.
        """
        schema = {**self.schema, "type": "object"}
        if "properties" in schema and not schema.keys() & _OPEN and self.required <= self.properties.keys():
            schema["additionalProperties"] = False
        return schema

    def arguments(self, rules: Rules) -> str:
        """Add the schema of the arguments object to `rules`, and return a Lark expression that refers to it."""
        return rules.schema(f"tool_{self.index}", self.arguments_schema, spaced=True, lenient=not self.strict)


def is_name(text: str) -> bool:
    """Return whether the tool-call parsers accept `text` as the name of a tool or a parameter."""
    return _NAME.fullmatch(text) is not None
