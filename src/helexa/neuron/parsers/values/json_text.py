"""Convert parameter values that a model writes outside JSON to JSON text."""

import json
from collections.abc import Mapping
from typing import Any

from helexa.neuron.parsers.schema_types import schema_types

# chat templates write a model's own calls with these Python values
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_NUMBERS = {"integer": int, "number": (int, float)}


def strict_loads(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not strict JSON; NaN and Infinity are rejected.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dumps(value: Any) -> str:
    """Return the JSON text of a value, encodable as UTF-8.

    Raises:
        TypeError: JSON has no such type.
        ValueError: a number is NaN or infinite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _has_surrogates(text) else json.dumps(value, allow_nan=False)


def argument_text(written: str, schema: Mapping[str, Any]) -> str:
    """Return the JSON text of a bare parameter value, with a type that its schema allows.

    A value of another type becomes a string. If the schema names no type, valid JSON is kept and any other text becomes
    a string. Python's `True`, `False` and `None` are accepted if the schema names a type. References in `schema`
    resolve to its own definitions.
    """
    types = schema_types(schema)
    if "string" in types and not ("null" in types and written == "null"):
        return dumps(written)
    text = _PYTHON.get(written.strip(), written.strip()) if types else written.strip()
    try:
        value = strict_loads(text)
    except ValueError:
        return dumps(written)
    return text if not types or any(_is(value, kind) for kind in types) else dumps(written)


def _is(value: Any, kind: str) -> bool:
    match kind:
        case "boolean":
            return isinstance(value, bool)
        case "integer" | "number":
            return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "null":
            return value is None
        case _:
            return False


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)
