"""Reject malformed JSON Schemas, and adapt schemas to llguidance.

Some keywords that llguidance cannot enforce stay in the schemas. llguidance reports these keywords when it compiles a
grammar, and `grammar_check_and_rejection.py` then rejects the grammar.
"""

from collections.abc import Callable, Mapping
from typing import Any

from helexa.core.errors import ApiError
from helexa.neuron.parsers.json_schema import DEFINITIONS

MAX_DEPTH = 100
_MAX_STEPS = 150  # maximum depth of the recursion in `_ends`
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("items", "additionalItems", "prefixItems", "contains", "additionalProperties", "anyOf", "allOf", "oneOf")
# The formats that llguidance supports. According to JSON Schema, implementations ignore formats that they do not know.
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})

# Largest absolute value of a number whose schema has no bounds; near the largest bound that llguidance supports.
LARGEST = 10**18

# Value of `multipleOf` for a number whose schema has none: the smallest value that llguidance supports.
DECIMALS = 1e-10

_LEAST_RANGE = 1e-6  # numbers in a smaller range get no `multipleOf`, which might exclude all of them
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_NUMERIC = frozenset({"integer", "number"})
# A schema with one of these keywords gets no additional bounds, which could contradict the keyword.
_ELSEWHERE = frozenset({"enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not", "if"})

# Keywords, each with the value that has no effect.
_NEUTRAL: tuple[tuple[str, Any], ...] = (
    ("uniqueItems", False),
    ("not", False),
    ("propertyNames", True),
    ("unevaluatedProperties", True),
    ("unevaluatedItems", True),
    ("dependentRequired", {}),
    ("dependentSchemas", {}),
)
# Keywords, each with other keywords. Without one of the other keywords, the keyword has no effect.
_DEPENDENT = {
    "if": ("then", "else"),
    "then": ("if",),
    "else": ("if",),
    "minContains": ("contains",),
    "maxContains": ("contains",),
}
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"})
_NAMED = frozenset({"properties", "patternProperties", "required"})
# Keywords whose subschemas apply to the same value, and may evaluate its properties.
_APPLICATORS = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "dependentSchemas"})
_NOTHING: dict[str, Any] = {"enum": []}  # a schema that no value matches


def checked_schema(schema: Any, label: str) -> Mapping[str, Any]:
    """Return `schema`, or `{}` if it is `true`. `label` names it in error messages.

    Raises:
        ApiError: 400 `invalid_schema`: `schema` is not an object, or has more than `MAX_DEPTH` levels.
    """
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        raise ApiError(400, "invalid_schema", f"{label} must be an object, not a value of type {type(schema).__name__}")
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [item for value in level for item in _inside(value)]
        if not level:
            return schema
    raise ApiError(400, "invalid_schema", f"{label} has more than {MAX_DEPTH} levels; nest it less deeply")


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of a JSON Schema: `change` replaces each subschema and the schema.

    `change` gets a schema whose own subschemas are already changed, and may modify it. Only subschemas of the keywords
    `_BY_NAME` and `_SCHEMAS` are changed, for example not those of `not`, `if` and `then`.
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


def supportable(schema: Any) -> Any:
    """Return an equivalent schema with fewer keywords that llguidance rejects.

    Keywords without an effect are left out, such as unknown formats and `"uniqueItems": false`. Schemas that libraries
    for other languages generate have many of these keywords. Other keywords are replaced by keywords that llguidance
    supports. If this is not possible, the keywords stay.
    """
    return rewritten(schema, _supportable)


def allows_nothing(schema: Any) -> bool:
    """Return whether `schema` is `false`, or has `"not": {}`."""
    # Zod writes `"not": {}` for a property that must be absent.
    return schema is False or (isinstance(schema, Mapping) and schema.get("not") in ({}, True))


def _supportable(schema: dict[str, Any]) -> dict[str, Any]:
    if allows_nothing(schema):
        return _NOTHING
    if isinstance(name := schema.get("format"), str) and name not in _FORMATS:
        del schema["format"]
    for key, value in _NEUTRAL:
        if key in schema and schema[key] == value and isinstance(schema[key], type(value)):
            del schema[key]
    for key, others in _DEPENDENT.items():
        if key in schema and not any(other in schema for other in others):
            del schema[key]
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        schema.pop("contains", None)
        del schema["minContains"]
    if "unevaluatedProperties" in schema and not schema.keys() & _APPLICATORS:
        schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
        schema.pop("unevaluatedProperties", None)  # no property is unevaluated beside `additionalProperties`
    return _without_property_names(schema)


def _without_property_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace `propertyNames` by other keywords if it is one `enum` or `pattern`."""
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping) or names.get("type", "string") != "string":
        return schema
    restrictions = names.keys() - _ANNOTATIONS - {"type"}
    if not restrictions:
        del schema["propertyNames"]
    elif len(restrictions) == 1 and not schema.keys() & _NAMED:
        value = schema.get("additionalProperties", True)
        if isinstance(allowed := names.get("enum"), list) and all(isinstance(name, str) for name in allowed):
            schema |= {"properties": dict.fromkeys(allowed, value), "additionalProperties": False}
            del schema["propertyNames"]
        elif isinstance(pattern := names.get("pattern"), str):
            schema |= {"patternProperties": {pattern: value}, "additionalProperties": False}
            del schema["propertyNames"]
    return schema


def type_names(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the type names in the keyword `type` of a JSON Schema."""
    types = schema.get("type")
    return frozenset(name for name in (types if isinstance(types, list) else [types]) if isinstance(name, str))


def definitions(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the members `$defs` and `definitions` of `schema` that are objects."""
    return {key: schema[key] for key in DEFINITIONS if isinstance(schema.get(key), Mapping)}


def ends_somewhere(subschema: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether references resolve in `schema` without a cycle or deep nesting."""
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
                known[reference] = False  # if the check below meets the reference again, the references form a cycle
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


def bounded(schema: Any) -> Any:
    """Return a copy of `schema` that limits the number of digits of numbers.

    Bounds of `LARGEST` and 10 decimal places (`DECIMALS`) are added to numbers without a limit. They also replace wider
    bounds, such as those of 64-bit integers. A schema with another type, without `type`, or with a keyword of
    `_ELSEWHERE`, such as `enum`, gets no bounds.
    """
    return rewritten(schema, _with_bounds)


def _with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    numeric = _NUMERIC & type_names(schema)
    if not numeric or schema.keys() & _ELSEWHERE:
        return schema
    schema = {key: value for key, value in schema.items() if not _is_wide(key, value)}
    return schema | _bounds(schema, integer="number" not in numeric)


def _is_wide(key: str, value: Any) -> bool:
    if not isinstance(value, int | float):
        return False
    return (key in _LOWER and value < -LARGEST) or (key in _UPPER and value > LARGEST)


def _bounds(schema: Mapping[str, Any], *, integer: bool) -> dict[str, Any]:
    """Return the bounds to add to a number's schema, where it has no bounds itself.

    The result is empty if a bound in `schema` is not a number or has an absolute value above `LARGEST`.
    """
    stated = [schema[key] for key in (*_LOWER, *_UPPER) if key in schema]
    if not all(isinstance(bound, int | float) and abs(bound) <= LARGEST for bound in stated):
        return {}
    lower = [schema[key] for key in _LOWER if key in schema] or [-LARGEST]
    upper = [schema[key] for key in _UPPER if key in schema] or [LARGEST]
    bounds: dict[str, Any] = {}
    if lower == [-LARGEST]:
        bounds["minimum"] = -LARGEST
    if upper == [LARGEST]:
        bounds["maximum"] = LARGEST
    if not integer and "multipleOf" not in schema and min(upper) - max(lower) >= _LEAST_RANGE:
        bounds["multipleOf"] = DECIMALS
    return bounds
