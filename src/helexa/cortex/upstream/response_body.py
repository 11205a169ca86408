"""Reads the bodies of nodes' responses as JSON, and writes values as strict JSON.

The module `error_responses` reads the bodies of error responses.
"""

import json
from typing import Any, Never

import orjson

from helexa.core.errors import ApiError
from helexa.core.wire.request import without_lone_surrogates

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_json(data: bytes) -> tuple[Any, bytes]:
    """Parse an answer or an event. Return the value, and its bytes as strict JSON.

    NaN and infinite numbers become null, lone surrogates become U+FFFD, and a byte order mark is removed.

    Raises:
        ValueError: the data is not JSON, or is nested too deeply.
        ApiError: 502: the data contains NaN or infinite numbers, and is nested too deeply.
    """
    # A byte order mark, NaN and infinite numbers are accepted, although they are not JSON: some backends send them in
    # fields that the gateway does not read.
    data = data.removeprefix(BYTE_ORDER_MARK)
    try:
        return orjson.loads(data), data
    except orjson.JSONDecodeError as error:
        if (repaired := without_lone_surrogates(data)) != data:
            return read_json(repaired)
        if b"NaN" not in data and b"Infinity" not in data:
            raise
        try:
            value = json.loads(data, parse_constant=lambda _name: None)
        except RecursionError:
            raise error from None
        return value, as_json(value)


def as_json(value: Any) -> bytes:
    """Serialize a value from a node's response as JSON.

    Raises:
        ApiError: 502 `upstream_malformed_response` if the value is nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        if "64-bit" not in str(error):
            raise malformed(str(error)) from None
    try:
        # orjson rejects integers over 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except RecursionError:
        raise malformed("the JSON is nested too deeply") from None


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Parse the arguments of a tool call. Return None if they are not a JSON object.

    An empty text counts as an empty object. A JSON string that contains an object counts as this object.
    """
    try:
        arguments = _exact(text) if text.strip() else {}
        if isinstance(arguments, str):  # if the model writes the arguments as a string, some tool parsers encode twice
            arguments = _exact(arguments)
    except (RecursionError, ValueError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _exact(text: str) -> Any:
    """Parse JSON, with exact integers of any size, and U+FFFD for lone surrogates."""
    if "\\u" in text:
        text = without_lone_surrogates(text.encode()).decode()
    return json.loads(text, parse_constant=_reject_constant)


def _reject_constant(name: str) -> Never:
    raise ValueError(f"the JSON contains {name}, which is not a JSON value")


def malformed(problem: str) -> ApiError:
    """Return the 502 error for a malformed response of a node."""
    return ApiError(
        502,
        "upstream_malformed_response",
        f"the node's response is malformed: {problem}; try again, or check the node's server",
        type="api_error",
    )
