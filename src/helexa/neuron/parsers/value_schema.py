"""Find the JSON Schemas of the values inside a tool call's arguments."""

from collections.abc import Mapping
from typing import Any

from helexa.neuron.parsers.schema_types import resolved, with_definitions

_KEYWORDS = ("items", "additionalProperties")


def child_schema(schema: Mapping[str, Any], key: str | None, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON Schema of a value inside a container, or an empty schema if it is unknown.

    Args:
        schema: JSON Schema of the container.
        key: key of the value in an object; None for an item of an array.
        root: the schema that contains the definitions (`$defs`).
    """
    container = resolved(schema)
    properties = container.get("properties")
    child = properties.get(key) if key is not None and isinstance(properties, Mapping) else None
    if child is None:
        child = container.get(_KEYWORDS[key is not None])
    return with_definitions(child, root) if isinstance(child, Mapping) else {}
