"""Values as JSON text: how parameters that a model writes in another notation become arguments."""

import json
from collections.abc import Mapping
from typing import Any

from helexa.neuron.parsers.schema_types import schema_types

_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates show models their own calls
_NUMBERS = {"integer": int, "number": (int, float)}


def strict_loads(text: str) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is none, also where Python would take it for one.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dumps(value: Any) -> str:
    """The JSON text of a value, which can be written as UTF-8.

    Raises:
        TypeError: JSON has no such value.
        ValueError: likewise, for numbers.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _has_surrogates(text) else json.dumps(value, allow_nan=False)


def argument_text(written: str, schema: Mapping[str, Any]) -> str:
    """The JSON text of a parameter that was written bare, of the type that its schema wants.

    What is not of that type is a string. Where the schema names no type, JSON is what it says, and all else a string.
    Python's spelling counts where a boolean or null is wanted. What the schema refers to is among its own definitions.
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
