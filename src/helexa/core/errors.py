"""Exceptions with messages for users, and the error format of all OpenAI-compatible HTTP APIs.

HelexaError            base class; the message is one line
  ConfigError          a configuration file or variable is wrong
    UsageError         a command line option is wrong
  SourceError          a model source cannot be resolved or downloaded
  DoesNotFitError      a model needs more memory than is free
  TensorParallelError  a model cannot be divided among the requested number of ranks
  ModelFileError       a model file is corrupt, truncated or of an unsupported kind
  ApiError             an HTTP error response: status, type, code, message, extras
"""

from functools import partial
from typing import Any

_MAX_CHARS = 1000


class HelexaError(Exception):
    """Base class of errors that are shown to users. The message is one line that says what happened and what to do.

    Attributes:
        exit_code: exit code of a command that fails with this error.
    """

    exit_code = 1


class ConfigError(HelexaError):
    """A configuration file or environment variable is wrong, or does not fit this machine.

    The message names the file or variable, and the fix. The exit code is `EX_CONFIG` of BSD's sysexits.h.
    """

    exit_code = 78


class UsageError(ConfigError):
    """A command line option is wrong."""

    exit_code = 2


class SourceError(HelexaError):
    """A model source cannot be parsed, reached or downloaded.

    Attributes:
        kind: `repo_fetch_failed` (worth a retry), `repo_refused`, `not_cached`, `empty_repo`, `quant_not_found`,
            `invalid_source`, `disk_full`, `cache_unwritable` or `cache_failed`.
        details: further fields for the error response of `POST /models/load`.
    """

    def __init__(self, message: str, *, kind: str = "repo_fetch_failed", **details: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details


class DoesNotFitError(HelexaError):
    """A model needs more memory than is free.

    Attributes:
        kind: value of the field `kind` in the error response of `POST /models/load`.
        details: further fields for this error response: memory sizes in MiB.
    """

    kind = "does_not_fit"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


class TensorParallelError(HelexaError):
    """A model cannot be divided among the requested number of ranks.

    Attributes:
        kind: value of the field `kind` in the error response of `POST /models/load`.
        details: further fields for this error response: `tp_size`, the requested number of ranks;
            `max_tensor_parallel`, the largest possible number; `suggestion`; and others.
    """

    kind = "tensor_parallel_unsupported"

    def __init__(
        self, message: str, *, tp_size: int, max_tensor_parallel: int, suggestion: str, **details: Any
    ) -> None:
        super().__init__(message)
        self.details = {
            "tp_size": tp_size,
            "max_tensor_parallel": max_tensor_parallel,
            "suggestion": suggestion,
        } | details


class ModelFileError(HelexaError):
    """A model file is corrupt, truncated or unsupported. The message names the problem.

    The message may quote the file's content, so it is truncated to 1000 characters.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _MAX_CHARS else f"{message[: _MAX_CHARS - 3]}...")


class ApiError(HelexaError):
    """An HTTP error response. Its body has OpenAI's format: a JSON object `error` with `message`, `type` and `code`.

    Attributes:
        status: HTTP status code.
        type: value of `error.type`.
        code: value of `error.code`, or None.
        param: name of the invalid request field, or None.
        retry_after: seconds for the `Retry-After` header, an integer. None if the response has no such header.
        extras: further fields of `error`.
    """

    def __init__(
        self,
        status: int,
        code: str | None,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        retry_after: int | None = None,
        **extras: Any,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.extras = extras

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling. The default `Exception.__reduce__` would lose the keyword arguments."""
        fields = {"type": self.type, "param": self.param, "retry_after": self.retry_after, **self.extras}
        return partial(ApiError, **fields), (self.status, self.code, str(self))

    def envelope(self) -> dict[str, Any]:
        """Return the JSON body of the response: `{"error": {"message", "type", "code", "param", ...extras}}`."""
        error = {"message": str(self), "type": self.type, "code": self.code, "param": self.param}
        return {"error": error | self.extras}

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers of the error response: `Retry-After` if `retry_after` is set, else none."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def malformed_json(detail: str) -> ApiError:
    """Return the 400 error for a request body that is not JSON. `detail` describes the syntax error."""
    return ApiError(400, "malformed_json", f"the request body is not valid JSON: {detail}")


def invalid_body(message: str, param: str | None = None) -> ApiError:
    """Return the 400 error for a request body with a missing or invalid field. `param` is the name of the field."""
    return ApiError(400, "invalid_request_body", message, param=param)


def unsupported_media_type(content_type: str) -> ApiError:
    """Return the 415 error for a request whose content type is not JSON."""
    received = repr(content_type) if content_type else "none"
    message = (
        f"expected content-type application/json, got {received}; send the header 'Content-Type: application/json'"
    )
    return ApiError(415, "unsupported_media_type", message)


def unsupported_parameter(param: str, message: str | None = None) -> ApiError:
    """Return the 400 error for a request parameter that helexa does not implement."""
    return ApiError(400, "unsupported_parameter", message or f"'{param}' is not supported", param=param)


def missing_model() -> ApiError:
    """Return the 400 error for a request that names no model."""
    return ApiError(400, "missing_model_field", "missing 'model' field in request body", param="model")


def model_not_found(model: str, hint: str = "") -> ApiError:
    """Return the 404 error for an unknown model. `hint` is added to the message."""
    text = f"model '{model}' not found" + (f"; {hint}" if hint else "")
    return ApiError(404, "model_not_found", text, param="model", model_id=model)


def context_length_exceeded(prompt_tokens: int, limit: int) -> ApiError:
    """Return the 400 error for a prompt that is longer than the context length `limit`.

    The message uses OpenAI's wording. Coding agents recognize this wording and then compact the conversation.
    """
    return ApiError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
        f"{prompt_tokens} tokens. Please reduce the length of the messages.",
        param="messages",
        prompt_len=prompt_tokens,
        max=limit,
    )


def vision_unsupported(model: str) -> ApiError:
    """Return the error for a request that contains an image although its model accepts only text."""
    return ApiError(
        400,
        "vision_unsupported",
        f"model '{model}' reads text only, but the request contains an image",
        param="messages",
        model_id=model,
        suggestion="remove the image parts or choose a model with the 'vision' capability",
    )


def service_unavailable(message: str, retry_after: int) -> ApiError:
    """Return the 503 error for a request that cannot be served now. A retry after `retry_after` seconds may succeed."""
    return ApiError(503, "service_unavailable", message, type="api_error", retry_after=retry_after)


def overloaded(message: str, retry_after: int, status: int = 503) -> ApiError:
    """Return the error for a request that is rejected because a queue is full or a limit is reached.

    A retry after `retry_after` seconds may succeed.
    """
    return ApiError(status, "rate_limit_exceeded", message, type="rate_limit_error", retry_after=retry_after)


def shutting_down() -> ApiError:
    """Return the error for a request to a server that is shutting down."""
    return ApiError(503, "shutting_down", "the server is shutting down", type="api_error", retry_after=15)


def internal_error(message: str = "internal error; see the server's log") -> ApiError:
    """Return the 500 error for an unexpected failure. `message` must not contain a traceback."""
    return ApiError(500, None, message, type="api_error")
