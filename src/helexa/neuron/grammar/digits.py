"""Limits the digits of numbers in a JSON Schema, because a weak model may otherwise repeat digits without end."""

from collections.abc import Mapping
from typing import Any

from helexa.neuron.grammar.schema import rewritten, type_names

LARGEST = 10**18
"""Largest absolute value of a number whose schema has no bounds; near the largest bound that llguidance supports."""

DECIMALS = 1e-10
"""Value of `multipleOf` for a number whose schema has none: the smallest value that llguidance supports."""

_LEAST_RANGE = 1e-6  # a smaller range may contain no multiple of a step
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_NUMERIC = frozenset({"integer", "number"})
# Additional bounds may contradict these keywords.
_ELSEWHERE = frozenset({"enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not", "if"})


def bounded(schema: Any) -> Any:
    """Return a copy of the JSON Schema `schema` that limits the number of digits of numbers.

    If a number has no lower or no upper bound, the bound -`LARGEST` or `LARGEST` is added. If the number of decimal
    places is not limited, the limit is 10 (`DECIMALS`).
    """
    return rewritten(schema, _with_bounds)


def _with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    numeric = _NUMERIC & type_names(schema)
    if not numeric or schema.keys() & _ELSEWHERE:
        return schema
    return schema | _bounds(schema, integer="number" not in numeric)


def _bounds(schema: Mapping[str, Any], *, integer: bool) -> dict[str, Any]:
    """Return the keywords `minimum`, `maximum` and `multipleOf` to add to the schema of a number.

    A keyword is returned only if `schema` has no corresponding limit. The result is empty if a bound in `schema` is not
    a number or has an absolute value above `LARGEST`.
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
