"""Exceptions for the command line, and the one error envelope of all HTTP APIs.

HelexaError            a failure in one line, for users
  ConfigError          a configuration file or variable is wrong
  SourceError          a model source cannot be resolved or downloaded
  DoesNotFitError      a model needs more memory than is free
  ModelFileError       a model file is corrupt, truncated or of an unsupported kind
  ApiError             an HTTP error response: status, type, code, message, extras
"""

from functools import partial
from typing import Any

_MAX_CHARS = 1000


class HelexaError(Exception):
    """Base class of errors for users. The message is one line: what happened, and what to do."""


class ConfigError(HelexaError):
    """A configuration file or environment variable is wrong."""


class SourceError(HelexaError):
    """A model source cannot be parsed, reached or downloaded.

    Attributes:
        kind: `repo_fetch_failed` (worth a retry), `repo_refused`, `not_cached`, `empty_repo`, `quant_not_found`,
            `invalid_source`, `disk_full`, `cache_unwritable` or `cache_failed`.
        details: additional fields of the error response of `POST /models/load`.
    """

    def __init__(self, message: str, *, kind: str = "repo_fetch_failed", **details: Any) -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details


class DoesNotFitError(HelexaError):
    """A model needs more memory than is free.

    Attributes:
        kind: value of `kind` in the error response of `POST /models/load`.
        details: memory sizes in MiB, by name.
    """

    kind = "does_not_fit"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


class ModelFileError(HelexaError):
    """A model file is corrupt, truncated or unsupported; the text names the problem.

    The text may quote the file's content, so it is truncated to 1000 characters.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _MAX_CHARS else f"{message[: _MAX_CHARS - 3]}...")


class ApiError(HelexaError):
    """An HTTP error response in the OpenAI envelope.

    Attributes:
        status: HTTP status code.
        type: the envelope's `type`.
        code: the envelope's `code`, or None.
        param: name of the offending request field, or None.
        retry_after: whole seconds for the `Retry-After` header; None if a retry cannot succeed.
        extras: further fields inside `error`.
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
        """Support pickling: the default `Exception.__reduce__` would lose the keyword arguments."""
        fields = {"type": self.type, "param": self.param, "retry_after": self.retry_after, **self.extras}
        return partial(ApiError, **fields), (self.status, self.code, str(self))

    def envelope(self) -> dict[str, Any]:
        """Return the JSON body: `{"error": {"message", "type", "code", "param", ...extras}}`."""
        error = {"message": str(self), "type": self.type, "code": self.code, "param": self.param}
        return {"error": error | self.extras}

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers of the error response: `Retry-After`, if set."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def malformed_json(detail: str) -> ApiError:
    """Return the error for a body that is not JSON."""
    return ApiError(400, "malformed_json", f"the request body is not valid JSON: {detail}")


def invalid_body(message: str, param: str | None = None) -> ApiError:
    """Return the error for a body with a missing or invalid field."""
    return ApiError(400, "invalid_request_body", message, param=param)


def unsupported_media_type(content_type: str) -> ApiError:
    """Return the 415 error for a request whose content type is not JSON."""
    received = repr(content_type) if content_type else "none"
    return ApiError(415, "unsupported_media_type", f"expected content-type application/json, got {received}")


def unsupported_parameter(param: str, message: str | None = None) -> ApiError:
    """Return the error for a parameter that helexa does not implement."""
    return ApiError(400, "unsupported_parameter", message or f"'{param}' is not supported", param=param)


def missing_model() -> ApiError:
    """Return the error for a request without a model."""
    return ApiError(400, "missing_model_field", "missing 'model' field in request body", param="model")


def model_not_found(model: str, hint: str = "") -> ApiError:
    """Return the error for an unknown model."""
    text = f"model '{model}' not found" + (f"; {hint}" if hint else "")
    return ApiError(404, "model_not_found", text, param="model", model_id=model)


def context_length_exceeded(prompt_tokens: int, limit: int) -> ApiError:
    """Return the error for a prompt above the context length.

    Agents recognize the wording of the message and then compact the conversation.
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
    """Return the error for an image part sent to a text model."""
    return ApiError(
        400,
        "vision_unsupported",
        f"model '{model}' reads text only, but the request contains an image",
        param="messages",
        model_id=model,
        suggestion="remove the image parts or choose a model with the 'vision' capability",
    )


def service_unavailable(message: str, retry_after: int) -> ApiError:
    """Return the error for a request that cannot be served now; a retry may succeed."""
    return ApiError(503, "service_unavailable", message, type="api_error", retry_after=retry_after)


def overloaded(message: str, retry_after: int, status: int = 503) -> ApiError:
    """Return the error for a request that is rejected because a queue is full or a limit is reached."""
    return ApiError(status, "rate_limit_exceeded", message, type="rate_limit_error", retry_after=retry_after)


def shutting_down() -> ApiError:
    """Return the error for a request to a server that is shutting down."""
    return ApiError(503, "shutting_down", "the server is shutting down", type="api_error", retry_after=15)


def internal_error(message: str = "internal error; see the server's log") -> ApiError:
    """Return the 500 error for an unexpected failure. `message` must not contain a traceback."""
    return ApiError(500, None, message, type="api_error")
