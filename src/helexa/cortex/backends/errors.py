"""Errors in a backend's whole completions and streams."""

from collections.abc import Mapping
from typing import Any

from helexa.core.errors import ApiError
from helexa.cortex.upstream.error_responses import read_error_value
from helexa.cortex.upstream.response_body import malformed

_REASON_CHARS = 64
_UNKNOWN = 500
_STATUSES = {
    "invalid_request_error": 400,
    "badrequesterror": 400,
    "rate_limit_error": 429,
    "exceed_context_size_error": 400,
    "overloaded_error": 503,
}
_MINIMAX_STATUSES = {1002: 429, 1026: 400, 1027: 400, 1039: 400, 1041: 429, 2013: 400}


def error_in(value: Mapping[str, Any], *, named: bool = False) -> ApiError | None:
    """Return the error in a backend's completion or stream event; None without one.

    Args:
        value: the JSON object.
        named: True if the event has the name `error`. Any object is then an error.
    """
    if value.get("error"):
        return _error(value["error"])
    base = value.get("base_resp")
    if isinstance(base, dict) and base.get("status_code") not in (None, 0):
        code = base["status_code"]
        return read_error_value(_MINIMAX_STATUSES.get(code, _UNKNOWN) if isinstance(code, int) else _UNKNOWN, base)
    if value.get("object") == "error" or named:
        return _error(value)
    choices = value.get("choices")
    if choices is None and "detail" in value:
        return _error(value["detail"])
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and choice.get("error"):
            return _error(choice["error"])
    return None


def failed_answer(reason: Any) -> ApiError:
    """Return the 502 error for a completion whose finish reason means a failure."""
    shown = str(reason)[:_REASON_CHARS]
    return ApiError(
        502,
        "upstream_error",
        f"the node ended its answer with the finish reason '{shown}'; try again",
        type="api_error",
    )


def _error(error: Any) -> ApiError:
    """Return a backend's error, which is an object or a text, as `ApiError`."""
    fields = error if isinstance(error, dict) else {}
    code, kind = fields.get("code"), fields.get("type")
    if type(code) is not int:
        code = _STATUSES.get(kind.lower(), _UNKNOWN) if isinstance(kind, str) else _UNKNOWN
    # The client did not cause these errors, so it gets status 502. A backend's 401, 402 or 403 is about the gateway's
    # own key or account. Its 404 is about a model that the backend itself has listed.
    status = 502 if code in (401, 402, 403, 404) or not 400 <= code < 600 else code
    return read_error_value(status, {"error": error})


def incomplete() -> ApiError:
    """Return the 502 error for a completion that ended without a finish reason."""
    return malformed("the answer ended without a finish reason")
