"""Convert values of tool-call arguments to JSON text."""

import json
import re
from collections.abc import Mapping
from typing import Any

from helexa.neuron.parsers.json_schema import schema_types

# Models write these Python values, because chat templates render earlier calls with them.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_WHOLE = re.compile(r"(-?[0-9]+)\.0+")
_NUMBERS = {"integer": int, "number": (int, float)}

# Maximum length of a value without quotation marks. Such a value is held back until later text shows its end.
MAX_BARE = 400

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ZEROS = re.compile(r"\A([-+]?)0+(?=[0-9])")
_LOOSE_NUMBER = re.compile(r"\+?(-?)(0|[1-9][0-9]*)?(?:\.([0-9]*))?")
_LITERALS = ("true", "false", "null")
# JSON values of literals in Python and JavaScript
_FOREIGN = {"True": "true", "False": "false", "None": "null", "undefined": "null"}
_FOREIGN |= dict.fromkeys(("NaN", "Infinity", "-Infinity", "+Infinity", "nan", "inf", "-inf"), "null")


def strict_loads(text: str) -> Any:
    """Parse the JSON text of an argument strictly and return the value.

    Raises:
        ValueError: the text is not strict JSON. NaN and Infinity are not allowed.
    """
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("the JSON text is nested too deeply") from None


def dumps(value: Any) -> str:
    """Return an argument's `value` as JSON text that can be encoded as UTF-8.

    Raises:
        TypeError: the value has a type that JSON does not have.
        ValueError: a number is NaN or infinite.
        RecursionError: the value is nested too deeply.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # UTF-8 cannot encode a half of a surrogate pair, but JSON can write it as an escape sequence.
    return text if text.isascii() or not _has_surrogates(text) else json.dumps(value, allow_nan=False)


def argument_text(bare: str, schema: Mapping[str, Any]) -> str:
    """Convert an argument without JSON syntax, such as `New York`, to JSON text.

    If the schema allows strings, the argument becomes a string, except `null` if the schema allows null. Otherwise, an
    argument that is valid JSON of an allowed type stays unchanged, except for white space around it, and any other
    argument becomes a string. If the schema restricts the type, Python's `True`, `False` and `None` are also accepted,
    and `5.0` becomes `5` if the schema allows integers and no fractions.
    """
    types = schema_types(schema)
    # `5` is the string "5" if the schema allows strings.
    if "string" in types and not ("null" in types and bare == "null"):
        return dumps(bare)
    text = _PYTHON.get(bare.strip(), bare.strip()) if types else bare.strip()
    try:
        value = strict_loads(text)
    except ValueError:
        return dumps(bare)
    # If the schema allows integers but no fractions, `5.0` means 5.
    if types and not any(has_type(value, kind) for kind in types):
        whole = whole_number(text, schema)
        return dumps(bare) if whole == text else whole
    return text


def whole_number(text: str, schema: Mapping[str, Any]) -> str:
    """Return the number `text`; drop `.0` if `schema` allows integers, no fractions."""
    match = _WHOLE.fullmatch(text)
    if match and "integer" in (types := schema_types(schema)) and "number" not in types:
        return match[1]
    return text


def has_type(value: Any, kind: str) -> bool:
    """Return whether `value` has the JSON Schema type `kind`; False for `string`."""
    match kind:
        case "boolean":
            return isinstance(value, bool)
        case "integer" | "number":
            # Python's booleans are integers, JSON's are not.
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
    raise ValueError(f"JSON does not allow the value {constant}")


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def bare_value(text: str, schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Convert a value without quotation marks to JSON text.

    Python's and JavaScript's literals become JSON's literals, and `NaN` becomes `null`. Other words become strings, and
    so do numbers if the schema allows strings and no numbers. Otherwise, numbers such as `+5` and `.5` are corrected.

    Args:
        schema: JSON Schema of the value; empty if it is unknown.

    Returns:
        The JSON text, and the name of the repaired mistake or "". None if `text` is empty or longer than `MAX_BARE`.
    """
    if not text or len(text) > MAX_BARE:
        return None
    if text in _LITERALS:
        return text, ""
    types = schema_types(schema) if schema else frozenset[str]()
    has_numbers = not types.isdisjoint(_NUMBERS)
    if _NUMBER.fullmatch(text):
        if "string" in types and not has_numbers:
            return dumps(text), "type"
        whole = whole_number(text, schema)
        return whole, "" if whole == text else "integer"
    if text in _FOREIGN:
        return _FOREIGN[text], "literal"
    # `007` may be a code, so it becomes a number only if the schema allows numbers and no strings.
    digits = _ZEROS.sub(r"\1", text) if has_numbers and "string" not in types else text
    loose = _LOOSE_NUMBER.fullmatch(digits) if has_numbers or "string" not in types else None
    if loose and (loose[2] or loose[3]):
        number = f"{loose[1]}{loose[2] or '0'}" + (f".{loose[3]}" if loose[3] else "")
        return whole_number(number, schema), "number"
    return dumps(text), "bare_word"
