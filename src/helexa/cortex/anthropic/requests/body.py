"""Conversion between JSON bodies and objects, with Anthropic's errors."""

from typing import Any

import orjson

from helexa.core.errors import malformed_json
from helexa.cortex.anthropic.errors import invalid_anthropic_body


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON body that must be an object.

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


def to_json(value: dict[str, Any]) -> bytes:
    """Serialize an object that was derived from a request body.

    Raises:
        ApiError: 400 `invalid_anthropic_body` if the object is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise invalid_anthropic_body("body", str(error)) from None
