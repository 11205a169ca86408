"""Schema that constrains a response: a JSON Schema, or a pydantic model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from helexa.generation.completion import Completion
from helexa.generation.errors import InvalidRequestError, SchemaError

if TYPE_CHECKING:
    from pydantic import BaseModel

Schema = "Mapping[str, Any] | type[BaseModel]"


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """A JSON Schema that constrains responses.

    Attributes:
        schema: the JSON Schema.
        model: pydantic class into which responses are parsed, or None for plain JSON values.
    """

    schema: dict[str, Any]
    model: "type[BaseModel] | None" = None

    @classmethod
    def from_schema(cls, schema: "Mapping[str, Any] | type[BaseModel] | None") -> "AnswerSchema | None":
        """Return an `AnswerSchema` for a JSON Schema or a pydantic model, or None if `schema` is None.

        Raises:
            InvalidRequestError: `schema` is neither a mapping nor a pydantic model.
        """
        if schema is None:
            return None
        if isinstance(schema, Mapping):
            return cls(dict(schema))
        if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
            return cls(_closed(schema.model_json_schema()), schema)
        raise InvalidRequestError(f"a schema is a JSON Schema or a pydantic model, not {schema!r:.100}")

    @property
    def response_format(self) -> dict[str, Any]:
        """The `response_format` field for the body of an OpenAI chat request."""
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.schema, "strict": True}}

    def parsed(self, completion: Completion) -> Any:
        """Parse a response. Return an instance of the pydantic class, or JSON values if there is no class.

        Raises:
            SchemaError: the response does not match the pydantic class, or is not JSON.
        """
        text = completion.text
        try:
            return json.loads(text) if self.model is None else self.model.model_validate_json(text)
        except ValueError as error:  # includes pydantic's ValidationError
            if completion.finish_reason == "length":
                reason = "it was truncated at the token limit; raise max_tokens"
            else:
                reason = " ".join(str(error).split())[:300]
            raise SchemaError(f"the answer does not match the schema: {reason}", completion) from None


def _closed(schema: Any) -> Any:
    """Return a copy of a JSON Schema in which objects have no additional properties.

    If the schema of an object sets `additionalProperties` itself, this value is kept.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(item) for name, item in schema.items()}
    return {"additionalProperties": False, **closed} if isinstance(schema.get("properties"), dict) else closed
