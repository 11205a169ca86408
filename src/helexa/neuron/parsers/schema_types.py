"""Find the value types that a JSON Schema allows."""

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote

_MAX_DEPTH = 16
DEFINITIONS = ("$defs", "definitions")
"""Keywords of JSON Schema that hold the targets of references."""

_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def with_definitions(part: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of a schema together with the definitions of the whole schema."""
    defined = {key: whole[key] for key in DEFINITIONS if key in whole}
    return {**part, **defined} if defined else part


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the target of a schema that is only a reference or a single-element `allOf`, merged with its other
    keywords.
    """
    for _ in range(_MAX_DEPTH):
        reference, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str):
            key, inner = "$ref", _target(reference, schema)
        else:
            key, inner = "allOf", parts[0] if isinstance(parts, list) and len(parts) == 1 else None
        if not isinstance(inner, Mapping):
            break
        schema = {**inner, **{other: schema[other] for other in schema if other != key}}
    return schema


def schema_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema with its definitions allows; empty if the schema names no type."""
    return _types(schema, schema, set(), _MAX_DEPTH)


def is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether every bare value is a string under this schema."""
    types = schema_types(schema)
    return "string" in types and "null" not in types


def _types(schema: Any, root: Mapping[str, Any], seen: set[str], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    named = schema.get("type")
    asked = [frozenset(kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str))]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)  # visit each reference once
        asked.append(_types(_target(reference, root), root, seen, depth - 1))
    asked += [_types(part, root, seen, depth - 1) for part in _listed(schema, "allOf")]
    for key in ("anyOf", "oneOf"):
        asked.append(frozenset[str]().union(*(_types(part, root, seen, depth - 1) for part in _listed(schema, key))))
    options = [schema["const"]] if "const" in schema else _listed(schema, "enum")
    kinds = frozenset(_KINDS.get(type(option), "") for option in options)
    asked.append(kinds if len(kinds) == 1 else frozenset())
    return _common(asked)


def _common(asked: Iterable[frozenset[str]]) -> frozenset[str]:
    common = frozenset[str]()
    for types in asked:
        common = common & types or common or types
    return common


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    listed = schema.get(key)
    return listed if isinstance(listed, list) else []


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the definition that a reference names; None for other references."""
    start, *path = unquote(reference).split("/")
    if start != "#" or not path or path[0] not in DEFINITIONS:
        return None
    found: Any = root
    for step in path:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
