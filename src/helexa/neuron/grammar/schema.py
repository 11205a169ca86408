"""Checks JSON Schemas from requests before llguidance compiles them."""

from collections.abc import Mapping
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.parsers.schema_types import DEFINITIONS

MAX_DEPTH = 100
_MAX_STEPS = 150


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
