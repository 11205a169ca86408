"""Why a prompt has no answer.

GenerationError          any of them
  InvalidRequestError    the prompt or an option cannot be used; the same again fails again
    ContextLengthError   the prompt does not fit into the model's context
  ModelNotFoundError     there is no such model
  UnreachableError       no server there, or the connection to it broke
  EngineError            the model failed, or is too busy; `retryable` says whether the same may succeed in a moment
  SchemaError            the answer is not what its schema asks for, as when it was cut at its limit
  BatchError             an item of a batch failed, with all results so far

Models that cannot be fetched or loaded raise the errors of `helexa.core.errors`: all are a `HelexaError`.
"""

from collections.abc import Sequence
from typing import Self

from helexa.core.errors import ApiError, HelexaError
from helexa.generation.completion import Completion


class GenerationError(HelexaError):
    """A prompt has no answer.

    Attributes:
        code: names the refusal, as in the API's error envelope; None where it has no name.
        retryable: the same may succeed in a moment.
        index: the prompt's place in its batch, None outside of one.
        exit_code: what a command that fails so ends with.
    """

    exit_code = 1

    def __init__(self, message: str, *, code: str | None = None, retryable: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable
        self.index: int | None = None

    def at(self, index: int) -> Self:
        """The same, of the prompt at `index` of a batch."""
        self.index = index
        return self


class InvalidRequestError(GenerationError):
    """The prompt or an option cannot be used."""

    exit_code = 2


class ContextLengthError(InvalidRequestError):
    """The prompt does not fit into the model's context."""

    exit_code = 1


class ModelNotFoundError(GenerationError):
    """There is no such model."""

    exit_code = 4


class UnreachableError(GenerationError):
    """There is no server, or the connection to it broke."""

    exit_code = 3


class EngineError(GenerationError):
    """The model failed, or is too busy."""


class SchemaError(GenerationError):
    """The answer is not what its schema asks for.

    Attributes:
        completion: the answer.
    """

    def __init__(self, message: str, completion: Completion) -> None:
        super().__init__(message, code="schema")
        self.completion = completion


class BatchError(GenerationError):
    """An item of a batch failed, which ended the batch.

    Attributes:
        results: by the prompts' order, those that were finished; None for the others, an error for the one that failed.
    """

    def __init__(self, error: GenerationError, results: Sequence[Completion | GenerationError | None]) -> None:
        super().__init__(f"prompt {error.index}: {error}", code=error.code, retryable=error.retryable)
        self.exit_code = error.exit_code
        self.index = error.index
        self.results = results


def generation_error(error: ApiError) -> GenerationError:
    """A refusal on the wire as an error of this library."""
    message, code = str(error), error.code
    if code == "context_length_exceeded":
        return ContextLengthError(message, code=code)
    if code == "model_not_found":
        return ModelNotFoundError(message, code=code)
    if error.status < 500 and error.status not in (408, 429):
        return InvalidRequestError(message, code=code)
    return EngineError(message, code=code, retryable=error.retry_after is not None)
