"""Read JSON Schemas: allowed types, references (`$ref`), schemas of children."""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

_MAX_DEPTH = 16
DEFINITIONS = ("$defs", "definitions")  # Keywords of JSON Schema that contain the targets of references (`$ref`)

_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}

_KEYWORDS = ("items", "additionalProperties")


def with_definitions(subschema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `subschema` with the definitions (`$defs`) of its root schema `root`."""
    defined = {key: root[key] for key in DEFINITIONS if key in root}
    return {**subschema, **defined} if defined else subschema


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `schema` with the keywords of the referenced schema instead of `$ref`.

    An `allOf` that contains a single schema is replaced in the same way. References in the inserted keywords are
    also replaced. If `schema` and the inserted schema have the same keyword, the value in `schema` applies. `schema`
    must contain the definitions (see `with_definitions`). A reference to another place stays.
    """
    # The number of steps is limited, because references may form a cycle.
    for _ in range(_MAX_DEPTH):
        reference, subschemas = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str):
            key, inner = "$ref", _target(reference, schema)
        else:
            key, inner = "allOf", subschemas[0] if isinstance(subschemas, list) and len(subschemas) == 1 else None
        if not isinstance(inner, Mapping):
            break
        schema = {**inner, **{keyword: schema[keyword] for keyword in schema if keyword != key}}
    return schema


def schema_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the JSON types to which `schema` is restricted.

    The result is empty if nothing restricts the types, or only an `enum` with values of several types. `schema` must
    contain the definitions of its references (see `with_definitions`).
    """
    return _types(schema, schema, set(), _MAX_DEPTH)


def is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether `schema` makes every value without quotation marks a string."""
    types = schema_types(schema)
    return "string" in types and "null" not in types


def _types(schema: Any, root: Mapping[str, Any], visited: set[str], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    constraints = [frozenset(name for name in names if isinstance(name, str))]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in visited:
        visited.add(reference)  # visit each reference once
        constraints.append(_types(_target(reference, root), root, visited, depth - 1))
    constraints += [_types(subschema, root, visited, depth - 1) for subschema in _list_at(schema, "allOf")]
    for key in ("anyOf", "oneOf"):
        options = (_types(subschema, root, visited, depth - 1) for subschema in _list_at(schema, key))
        constraints.append(frozenset[str]().union(*options))
    values = [schema["const"]] if "const" in schema else _list_at(schema, "enum")
    kinds = frozenset(_KINDS.get(type(value), "") for value in values)
    constraints.append(kinds if len(kinds) == 1 else frozenset())
    return _common(constraints)


def _common(constraints: Iterable[frozenset[str]]) -> frozenset[str]:
    common = frozenset[str]()
    for types in constraints:
        # An empty set means no restriction. If restrictions contradict each other, the first one applies.
        common = common & types or common or types
    return common


def _list_at(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the definition in `root` that the `$ref` `reference` names, or None."""
    start, *path = unquote(reference).split("/")
    if start != "#" or not path or path[0] not in DEFINITIONS:
        return None
    target: Any = root
    for step in path:
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
    return target


def child_schema(schema: Mapping[str, Any], key: str | None, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON Schema of a value inside a container, {} if it is unknown.

    Args:
        key: key of the value in an object; None for an item of an array.
        root: the schema that contains the definitions (`$defs`).
    """
    container = resolved(schema)
    properties = container.get("properties")
    child = properties.get(key) if key is not None and isinstance(properties, Mapping) else None
    if child is None:
        child = container.get(_KEYWORDS[key is not None])
    return with_definitions(child, root) if isinstance(child, Mapping) else {}
