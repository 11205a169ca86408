"""Convert values of tool-call arguments to JSON text."""

import json
import re
from collections.abc import Mapping
from typing import Any

from helexa.neuron.parsers.schema_types import schema_types

# Models write these Python values, because chat templates render earlier calls with them.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_WHOLE = re.compile(r"(-?[0-9]+)\.0+")
_NUMBERS = {"integer": int, "number": (int, float)}


def strict_loads(text: str) -> Any:
    """Parse JSON text and return the value.

    Raises:
        ValueError: the text is not strict JSON. NaN and Infinity are not allowed.
    """
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dumps(value: Any) -> str:
    """Return `value` as JSON text that can be encoded as UTF-8.

    Raises:
        TypeError: the value has a type that JSON does not have.
        ValueError: a number is NaN or infinite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _has_surrogates(text) else json.dumps(value, allow_nan=False)


def argument_text(bare: str, schema: Mapping[str, Any]) -> str:
    """Convert an argument that the model wrote without JSON syntax to JSON text of a type that its schema allows.

    If the schema allows strings, the argument becomes a string. An argument `null` stays null if the schema also allows
    null.

    Otherwise, an argument that is valid JSON of an allowed type stays unchanged, and any other argument becomes a
    string. If the schema restricts the type, Python's `True`, `False` and `None` are also accepted.

    Args:
        bare: the argument as the model wrote it, for example `5` or `New York`.
        schema: JSON Schema of the parameter. A `$ref` refers to the definitions (`$defs`) in this schema.
    """
    types = schema_types(schema)
    if "string" in types and not ("null" in types and bare == "null"):
        return dumps(bare)
    text = _PYTHON.get(bare.strip(), bare.strip()) if types else bare.strip()
    try:
        value = strict_loads(text)
    except ValueError:
        return dumps(bare)
    if types and not any(has_type(value, kind) for kind in types):
        whole = whole_number(text, schema)
        return dumps(bare) if whole == text else whole
    return text


def whole_number(text: str, schema: Mapping[str, Any]) -> str:
    """Return the JSON number `text` without its fraction if the fraction is 0 and `schema` allows only integers."""
    match = _WHOLE.fullmatch(text)
    if match and "integer" in (types := schema_types(schema)) and "number" not in types:
        return match[1]
    return text


def has_type(value: Any, kind: str) -> bool:
    """Return whether a JSON value has the JSON Schema type `kind`."""
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


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)
