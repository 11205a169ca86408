"""A tool as a grammar sees it: its name, what its arguments may be, and how closely that is followed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.grammar.rules import Rules
from helexa.neuron.grammar.schema import checked_schema

# With one of these, that a property is not mentioned does not mean that there is none.
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"})
_OPEN |= {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas", "minProperties"}
_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class Offer:
    """A tool that may be called.

    Attributes:
        index: which one it is.
        schema: the JSON Schema of its arguments.
        strict: whatever the schema asks for counts; else what cannot be seen to is left out of account.
    """

    index: int
    name: str
    schema: Mapping[str, Any]
    strict: bool

    def __post_init__(self) -> None:
        """Refuse a tool that cannot be called.

        Raises:
            ApiError: 400 `invalid_grammar` or `invalid_schema`.
        """
        if not is_name(self.name):
            raise ApiError(400, "invalid_grammar", f"'{self.name[:100]}' cannot be the name of a tool", param="tools")
        checked_schema(self.schema, f"the schema of tool '{self.name}'")

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the parameters that are named, in order."""
        properties = self.schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        """Parameters that each call must have."""
        required = self.schema.get("required")
        return frozenset(key for key in required if isinstance(key, str)) if isinstance(required, list) else frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether the schema is a list of parameters and nothing else that counts."""
        return not self.schema.keys() & (_OPEN - {"additionalProperties"}) and self.required <= self.properties.keys()

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """That of the arguments as a JSON object. Only parameters that are named occur, where some are."""
        schema = {**self.schema, "type": "object"}
        if "properties" in schema and not schema.keys() & _OPEN and self.required <= self.properties.keys():
            schema["additionalProperties"] = False
        return schema

    def arguments(self, rules: Rules) -> str:
        """What refers to the arguments as a JSON object."""
        return rules.schema(f"tool_{self.index}", self.arguments_schema, spaced=True, lenient=not self.strict)


def is_name(text: str) -> bool:
    """Whether parsers would read `text` as the name of a tool or of a parameter."""
    return _NAME.fullmatch(text) is not None
