"""Errors of requests.

GenerationError          base class
  InvalidRequestError    the prompt or an option is invalid; a retry would fail again
    ContextLengthError   the prompt does not fit into the model's context
  AuthenticationError    the server needs an API key, or rejects the key of the request (HTTP 401)
  PermissionDeniedError  the API key may not make this request (HTTP 403)
  NotFoundError          the server does not have what the request names (HTTP 404)
    ModelNotFoundError   the model does not exist
  RateLimitError         the API key reached a rate limit or its token budget (HTTP 429)
  UnreachableError       the server does not respond, or the connection broke
  EngineError            the model or the server failed
    OverloadedError      the server is too busy, or shuts down (HTTP 503 and 529)
  SchemaError            the response does not match the schema, for example because it reached its token limit
  BatchError             a prompt of a batch failed; contains all results so far

The attribute `retryable` of an error says whether the same request may succeed later.

Errors of downloading and loading models are in `helexa.core.errors`. All errors are subclasses of `HelexaError`.
"""

from collections.abc import Sequence
from typing import Self

from helexa.core.errors import ApiError, HelexaError
from helexa.generation.completion import Completion


class GenerationError(HelexaError):
    """A request failed.

    Attributes:
        code: error code, such as `model_not_found` in an error response of the API, or None.
        status: HTTP status of the error response, or None if the error is no response of a server or an engine.
        retryable: whether the same request may succeed if it is repeated after a short delay.
        index: index of the prompt in its batch, or None if the request is not part of a batch.
        exit_code: exit code of a `helexa` command that fails with this error.
    """

    exit_code = 1

    def __init__(
        self, message: str, *, code: str | None = None, status: int | None = None, retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.retryable = retryable
        self.index: int | None = None

    def at(self, index: int) -> Self:
        """Set the attribute `index` of this error, and return this error."""
        self.index = index
        return self


class InvalidRequestError(GenerationError):
    """The request failed: the prompt or an option is invalid."""

    exit_code = 2


class ContextLengthError(InvalidRequestError):
    """The request failed: the prompt does not fit into the model's context."""

    exit_code = 1


class AuthenticationError(GenerationError):
    """The request failed: the server needs an API key, or rejects the key.

    The key is read from `HELEXA_API_KEY`.
    """


class PermissionDeniedError(GenerationError):
    """The request failed: the API key may not make this request."""


class NotFoundError(GenerationError):
    """The request failed: the server does not have the named object or URL path."""


class ModelNotFoundError(NotFoundError):
    """The request failed: the model does not exist."""

    exit_code = 4


class UnreachableError(GenerationError):
    """The request failed: no response of the server, or a broken connection."""

    exit_code = 3


class RateLimitError(GenerationError):
    """The request failed: the API key reached a rate limit or token budget.

    `retryable` is True for a rate limit; `code` is `insufficient_quota` for a budget.
    """


class EngineError(GenerationError):
    """The request failed: an error of the model or the server."""


class OverloadedError(EngineError):
    """The request failed: the server is too busy, or it shuts down."""


class SchemaError(GenerationError):
    """The model's response does not match the schema of the request.

    Attributes:
        completion: the response.
    """

    def __init__(self, message: str, completion: Completion) -> None:
        super().__init__(message, code="schema")
        self.completion = completion


class BatchError(GenerationError):
    """A prompt of a batch failed, and the batch ended with this error.

    Attributes:
        results: one entry for each prompt, in the order of the prompts. An entry is a completion, the error of a
            failed prompt, or None for an unfinished prompt.
    """

    def __init__(self, error: GenerationError, results: Sequence[Completion | GenerationError | None]) -> None:
        super().__init__(
            f"prompt {error.index}: {error}", code=error.code, status=error.status, retryable=error.retryable
        )
        self.exit_code = error.exit_code
        self.index = error.index
        self.results = results


_BY_STATUS: dict[int, type[GenerationError]] = {
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    408: EngineError,
    429: RateLimitError,
    503: OverloadedError,
    529: OverloadedError,  # Anthropic's status for "overloaded", which third-party servers use too
}
_BY_CODE: dict[str | None, type[GenerationError]] = {
    "context_length_exceeded": ContextLengthError,
    "model_not_found": ModelNotFoundError,
}


def generation_error(error: ApiError) -> GenerationError:
    """Return the `GenerationError` that corresponds to an error response of the API."""
    by_status = _BY_STATUS.get(error.status, InvalidRequestError if error.status < 500 else EngineError)
    kind = _BY_CODE.get(error.code, by_status)
    return kind(str(error), code=error.code, status=error.status, retryable=error.retry_after is not None)
