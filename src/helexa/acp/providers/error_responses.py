"""Converts error responses of different servers to `ProviderError`."""

import email.utils
import json
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from helexa.acp.providers.requests_and_events import ErrorKind, ProviderError

MAX_MESSAGE_CHARACTERS = 500  # maximum number of characters quoted from a server's error message

_OVERFLOW_CODES = {"context_length_exceeded", "exceed_context_size_error", "request_too_large"}
_OVERFLOW = re.compile(
    r"context.{0,20}?(length|size|window|limit)|(prompt|input|request|message)s?\b.{0,40}\btoo (long|large|many tokens)"
    r"|exceeds? the maximum number of (input )?tokens|reduce the length",
    re.IGNORECASE | re.DOTALL,
)
_LIMITS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"context (?:length|size|window|limit)\D{0,24}?(\d{3,})",
        r">\s*(\d{3,})",
        r"(\d{3,})\s*(?:tokens?\s*)?maximum context",
        r"maximum number of (?:input )?tokens allowed \D{0,4}(\d{3,})",
    )
]
_QUOTA = {"insufficient_quota", "billing_hard_limit_reached", "billing_error"}
_BY_TYPE: dict[str, ErrorKind] = {
    "authentication_error": "auth",
    "permission_error": "auth",
    "rate_limit_error": "rate_limit",
    "rate_limit_exceeded": "rate_limit",
    "overloaded_error": "unavailable",
    "api_error": "unavailable",
    "server_error": "unavailable",
    "service_unavailable": "unavailable",
    "not_found_error": "model_not_found",
}
# Kinds of errors that servers report for an unsupported key of the request. Some servers send status 404 or 500.
_REQUEST_AT_FAULT = ("invalid", "model_not_found", "unavailable")
_NO_TOOLS = re.compile(
    r"\btools?\b.*(support|--jinja|--enable-auto-tool-choice|not permitted|not allowed|unknown|unexpected|unrecognized)"
    r"|(support|not made|unknown|unexpected|unrecognized|extra inputs).*\btools?\b",
    re.IGNORECASE,
)
_TEXTS: dict[ErrorKind, str] = {
    "auth": "rejected the API key; check api_key or api_key_env of this endpoint",
    "budget": "reports that the account's budget is used up; add credit or choose another endpoint",
    "rate_limit": "received too many requests",
    "context_limit": "reports that the conversation is too long for the model",
    "model_not_found": "does not have this model; choose another model",
    "invalid": "rejected the request",
    "unavailable": "is temporarily unavailable",
    "interrupted": "ended the response early",
}


def provider_error(
    endpoint: str, status: int, body: Any, headers: Mapping[str, str], secrets: Iterable[str]
) -> ProviderError:
    """Return a `ProviderError` for an error response of an endpoint.

    Args:
        status: HTTP status. It is 200 for an error event within a stream.
        body: response body as parsed JSON, or as text if it is not JSON.
        headers: response headers with lowercase names.
        secrets: texts that are replaced by `***` if the server's error message contains them.
    """
    error = _error(body)
    message = _message(error, body)
    codes = [code for key in ("code", "type") if isinstance(code := error.get(key), str)]
    kind = _kind(status, codes, message)
    text = f"{endpoint} {_TEXTS[kind]}"
    parameter = error.get("param")
    if isinstance(parameter, str) and parameter not in message:
        message = f"{message} ({parameter})".strip()
    if message:
        text += f": {_quoted(message, secrets)}"
    elif status >= 300:
        text += f" (HTTP {status})"
    return ProviderError(
        kind,
        text,
        retry_after=_retry_after(headers),
        context_limit=_limit(error, message) if kind == "context_limit" else None,
    )


def rejects(error: ProviderError, parameter: str) -> bool:
    """Return whether an error response rejects `parameter`, a key of the request."""
    return error.kind in _REQUEST_AT_FAULT and re.search(rf"\b{re.escape(parameter)}\b", error.message) is not None


def rejects_tools(error: ProviderError) -> bool:
    """Return whether an error response rejects tool calls for the model."""
    return error.kind in _REQUEST_AT_FAULT and _NO_TOOLS.search(error.message) is not None


def _error(body: Any) -> dict[str, Any]:
    """Return the error object: `body["error"]` if it is an object, else `body`."""
    if isinstance(body, list) and body:  # Google wraps errors in a list
        body = body[0]
    if not isinstance(body, dict):
        return {}
    inner = body.get("error")
    return inner if isinstance(inner, dict) else body


def _message(error: dict[str, Any], body: Any) -> str:
    for key in ("message", "error", "detail", "msg"):
        value = error.get(key)
        if isinstance(value, str) and value:
            return value
        if value and key == "detail":  # a list of field errors
            return json.dumps(value)
    return body if isinstance(body, str) and not body.lstrip().startswith("<") else ""


def _kind(status: int, codes: list[str], message: str) -> ErrorKind:
    if _QUOTA.intersection(codes) or status == 402:
        return "budget"
    if (
        _OVERFLOW_CODES.intersection(codes)
        or status == 413
        or (status < 500 and status != 429 and _OVERFLOW.search(message))
    ):
        return "context_limit"
    if status in (401, 403):
        return "auth"
    if status == 429:
        return "rate_limit"
    if status == 404:
        if "service_unavailable" in codes:
            return "unavailable"
        return "model_not_found" if "model_not_found" in codes or "model" in message.lower() else "invalid"
    if status >= 500 or status == 408:
        return "context_limit" if _limit({}, message) and _OVERFLOW.search(message) else "unavailable"
    if status < 300:
        known = next((code for code in codes if code in _BY_TYPE), "api_error")
        return _BY_TYPE[known]
    return "model_not_found" if "model_not_found" in codes else "invalid"


def _limit(error: dict[str, Any], message: str) -> int | None:
    for key in ("max", "n_ctx", "max_model_len", "context_length"):
        value = error.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    plain_message = message.replace(",", "").replace("_", "")
    return next((int(match[1]) for pattern in _LIMITS if (match := pattern.search(plain_message))), None)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("retry-after", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return max(0.0, seconds) if seconds < float("inf") else None


def _quoted(message: str, secrets: Iterable[str]) -> str:
    for secret in filter(None, secrets):
        message = message.replace(secret, "***")
    line = " ".join(message.split())
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else line[:MAX_MESSAGE_CHARACTERS] + " ..."
