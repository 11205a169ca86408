"""Parses and serializes JSON bodies. Failures become error responses of the Messages API."""

from typing import Any

import orjson

from helexa.core.errors import malformed_json
from helexa.cortex.anthropic.errors import invalid_anthropic_body


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a request body, and return the JSON object that it contains.

    Raises:
        ApiError: 400 because the body is not JSON (`malformed_json`) or not an object (`invalid_anthropic_body`).
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise malformed_json(str(error)) from None
    if not isinstance(value, dict):
        raise invalid_anthropic_body("body", "must be a JSON object")
    return value


def to_json(value: dict[str, Any]) -> bytes:
    """Serialize a JSON object that was built from a request body.

    Raises:
        ApiError: 400 `invalid_anthropic_body` if the object is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise invalid_anthropic_body("body", str(error)) from None
