"""Convert values that are written without quotation marks, such as `5`, `True` or `New York`, to JSON text."""

import re
from collections.abc import Mapping
from typing import Any

from helexa.neuron.parsers.values.json_text import dumps, whole_number

MAX_BARE = 400
"""Maximum length of a value without quotation marks. Such a value is held back until later text shows its end."""

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"\+?(-?)(0|[1-9][0-9]*)?(?:\.([0-9]*))?")
_LITERALS = ("true", "false", "null")
_FOREIGN = {"True": "true", "False": "false", "None": "null", "undefined": "null"}
_FOREIGN |= dict.fromkeys(("NaN", "Infinity", "-Infinity", "+Infinity", "nan", "inf", "-inf"), "null")


def bare_value(text: str, schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """Convert a value without quotation marks to JSON text.

    Python's and JavaScript's literals become JSON's literals, and `NaN` becomes `null`. Other words become strings.

    Args:
        text: the value.
        schema: JSON Schema of the value; empty if it is unknown.

    Returns:
        The JSON text, and the name of the repaired mistake or "". None if `text` is empty or too long.
    """
    if not text or len(text) > MAX_BARE:
        return None
    if text in _LITERALS:
        return text, ""
    if _NUMBER.fullmatch(text):
        whole = whole_number(text, schema)
        return whole, "" if whole == text else "integer"
    if text in _FOREIGN:
        return _FOREIGN[text], "literal"
    loose = _LOOSE_NUMBER.fullmatch(text)
    if loose and (loose[2] or loose[3]):
        number = f"{loose[1]}{loose[2] or '0'}" + (f".{loose[3]}" if loose[3] else "")
        return whole_number(number, schema), "number"
    return dumps(text), "bare_word"
