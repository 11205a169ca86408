"""Checks JSON Schemas from requests before llguidance compiles them."""

from collections.abc import Callable, Mapping
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.parsers.schema_types import DEFINITIONS

MAX_DEPTH = 100
_MAX_STEPS = 150
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("items", "additionalItems", "prefixItems", "contains", "additionalProperties", "anyOf", "allOf", "oneOf")
# llguidance's names. JSON Schema says: implementations ignore formats that they do not know.
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})


def checked_schema(schema: Any, label: str) -> Mapping[str, Any]:
    """Return `schema` if it is an object that is not nested too deeply. Return `{}` if `schema` is `true`.

    Args:
        schema: the value from the request.
        label: name of the schema in error messages.

    Raises:
        ApiError: 400 `invalid_schema`: `schema` is not an object, or has more than `MAX_DEPTH` levels.
    """
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise ApiError(400, "invalid_schema", f"{label} must be an object")
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        if not level:
            return schema
        level = [item for value in level for item in _inside(value)]
    raise ApiError(400, "invalid_schema", f"{label} is nested too deeply")


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of the JSON Schema `schema`, with the result of `change` in the place of each subschema.

    `change` gets a subschema whose own subschemas are already changed. Subschemas of `not` and `if` are not changed.
    """
    if isinstance(schema, list):
        return [rewritten(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for key in _BY_NAME:
        if isinstance(subschemas := schema.get(key), Mapping):
            result[key] = {name: rewritten(subschema, change) for name, subschema in subschemas.items()}
    for key in _SCHEMAS:
        if key in schema:
            result[key] = rewritten(schema[key], change)
    return change(result)


def without_ineffective(schema: Any) -> Any:
    """Return a copy of the JSON Schema `schema` without keywords that have no effect but that llguidance rejects.

    These keywords are unknown formats and `"uniqueItems": false`.
    """
    return rewritten(schema, _without_ineffective)


def _without_ineffective(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(name := schema.get("format"), str) and name not in _FORMATS:
        del schema["format"]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    return schema


def type_names(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the type names in the schema's `type` keyword, or an empty set if the schema has no `type`."""
    types = schema.get("type")
    return frozenset(name for name in (types if isinstance(types, list) else [types]) if isinstance(name, str))


def definitions(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the definitions to which `$ref` can refer, by the keyword that contains them (`$defs`, `definitions`)."""
    return {key: schema[key] for key in DEFINITIONS if isinstance(schema.get(key), Mapping)}


def ends_somewhere(subschema: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether all references in `subschema` lead to definitions in `schema` without a cycle."""
    return _ends(subschema, schema, {}, 0)


def _ends(subschema: Any, schema: Mapping[str, Any], known: dict[str, bool], steps: int) -> bool:
    if steps > _MAX_STEPS:
        return False
    if isinstance(subschema, Mapping):
        if "$dynamicRef" in subschema:
            return False
        reference = subschema.get("$ref")
        if isinstance(reference, str):
            if reference not in known:
                known[reference] = False  # marks the reference during its own check
                target = _target(reference, schema)
                known[reference] = target is not None and _ends(target, schema, known, steps + 1)
            if not known[reference]:
                return False
    return all(_ends(inner, schema, known, steps + 1) for inner in _inside(subschema))


def _target(reference: str, schema: Mapping[str, Any]) -> Any:
    for key, defined in definitions(schema).items():
        if reference.startswith(f"#/{key}/"):
            return defined.get(reference.removeprefix(f"#/{key}/"))
    return None


def _inside(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
