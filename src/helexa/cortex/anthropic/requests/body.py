"""Conversion between JSON bodies and objects, with Anthropic's errors."""

from typing import Any

import orjson

from helexa.core.errors import malformed_json
from helexa.cortex.anthropic.errors import invalid_anthropic_body


def read_object(body: bytes) -> dict[str, Any]:
    """Return a body as an object.

    Raises:
        ApiError: 400 `malformed_json` or `invalid_anthropic_body`.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise malformed_json(str(error)) from None
    if not isinstance(value, dict):
        raise invalid_anthropic_body("body", "must be a JSON object")
    return value


def encoded(value: dict[str, Any]) -> bytes:
    """Return an object derived from a body as JSON.

    Raises:
        ApiError: 400 `invalid_anthropic_body`: nested too deeply to be serialized.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise invalid_anthropic_body("body", str(error)) from None
