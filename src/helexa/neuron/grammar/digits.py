"""Limit the digits of numbers in a schema, because weak models may otherwise write digits up to their output limit."""

from collections.abc import Mapping
from typing import Any

from helexa.neuron.grammar.schema import type_names

LARGEST = 10**18
"""Limit of numbers without bounds in their schema, near the largest bound that llguidance supports."""

DECIMALS = 1e-10
"""Step of numbers without a step in their schema: the smallest step that llguidance supports."""

_LEAST_RANGE = 1e-6  # a smaller range may contain no multiple of a step
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_NUMERIC = frozenset({"integer", "number"})
# with these keywords, additional bounds may contradict
_ELSEWHERE = frozenset({"enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not", "if"})
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = ("items", "additionalItems", "prefixItems", "contains", "additionalProperties", "anyOf", "allOf", "oneOf")


def bounded(schema: Any) -> Any:
    """Return a copy of `schema` in which numbers without bounds have at most 18 digits before and 10 after the decimal
    point.
    """
    if isinstance(schema, list):
        return [bounded(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for key in _BY_NAME:
        if isinstance(subschemas := schema.get(key), Mapping):
            result[key] = {name: bounded(subschema) for name, subschema in subschemas.items()}
    for key in _SCHEMAS:
        if key in schema:
            result[key] = bounded(schema[key])
    numeric = _NUMERIC & type_names(schema)
    if not numeric or schema.keys() & _ELSEWHERE:
        return result
    return result | _bounds(schema, integer="number" not in numeric)


def _bounds(schema: Mapping[str, Any], *, integer: bool) -> dict[str, Any]:
    """Return the bounds to add to a numeric schema that does not limit its numbers."""
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
