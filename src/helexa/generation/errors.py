"""Errors of requests.

GenerationError          base class
  InvalidRequestError    the prompt or an option is invalid; a retry would fail again
    ContextLengthError   the prompt does not fit into the model's context
  ModelNotFoundError     the model does not exist
  UnreachableError       the server does not respond, or the connection broke
  EngineError            the model failed or is too busy; `retryable` tells whether a retry may succeed
  SchemaError            the response does not match the schema, for example because it reached its token limit
  BatchError             a prompt of a batch failed; contains all results so far

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
        retryable: whether the same request may succeed if it is repeated after a short delay.
        index: index of the prompt in its batch, or None if the request is not part of a batch.
        exit_code: exit code of a `helexa` command that fails with this error.
    """

    exit_code = 1

    def __init__(self, message: str, *, code: str | None = None, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
        self.index: int | None = None

    def at(self, index: int) -> Self:
        """Set the attribute `index` of this error, and return this error."""
        self.index = index
        return self


class InvalidRequestError(GenerationError):
    """The prompt or an option is invalid."""

    exit_code = 2


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit into the model's context."""

    exit_code = 1


class ModelNotFoundError(GenerationError):
    """The model does not exist."""

    exit_code = 4


class UnreachableError(GenerationError):
    """The server does not respond, or the connection broke."""

    exit_code = 3


class EngineError(GenerationError):
    """The model failed or is too busy."""


class SchemaError(GenerationError):
    """The model's response does not match the schema of the request.

    Attributes:
        completion: the response.
    """

    def __init__(self, message: str, completion: Completion) -> None:
        super().__init__(message, code="schema")
        self.completion = completion


class BatchError(GenerationError):
    """A prompt of a batch failed, and the batch ended.

    Attributes:
        results: one entry for each prompt, in the order of the prompts. An entry is a completion, the error of a
            failed prompt, or None for an unfinished prompt.
    """

    def __init__(self, error: GenerationError, results: Sequence[Completion | GenerationError | None]) -> None:
        super().__init__(f"prompt {error.index}: {error}", code=error.code, retryable=error.retryable)
        self.exit_code = error.exit_code
        self.index = error.index
        self.results = results


def generation_error(error: ApiError) -> GenerationError:
    """Return the `GenerationError` that corresponds to an error response of the API."""
    message, code = str(error), error.code
    if code == "context_length_exceeded":
        return ContextLengthError(message, code=code)
    if code == "model_not_found":
        return ModelNotFoundError(message, code=code)
    if error.status < 500 and error.status not in (408, 429):
        return InvalidRequestError(message, code=code)
    return EngineError(message, code=code, retryable=error.retry_after is not None)
