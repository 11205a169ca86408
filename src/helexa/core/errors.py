"""Exceptions with messages for users, and the error format of the HTTP APIs.

HelexaError            base class; the message is one line
  ConfigError          a configuration file or variable is wrong
    UsageError         a command line option is wrong
  SourceError          a model source cannot be resolved or downloaded
  DoesNotFitError      a model needs more memory than is free
  TensorParallelError  a model cannot be divided among the requested number of ranks
  ModelFileError       a model file is corrupt or truncated
    UnsupportedModelError  a model has an unsupported architecture, format or setting
  ApiError             an HTTP error response: status, type, code, message, extras
"""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from helexa.core.display import printable

MODEL_SLEEPING = "model_sleeping"  # code of the error for a model that cannot wake, because too little memory is free

_MAX_CHARS = 1000

# `ModelFileError.advice` for a file that the operating system cannot read
UNREADABLE_FILE = "check the permissions of the file, and its disk"

# Extras that only the package with the same name needs: the package `helexa.acp` needs the extra `acp`.
_EXTRAS = ("acp", "bench", "neuron")


class HelexaError(Exception):
    """Base class of errors for users: one line that says what happened and what to do."""

    exit_code = 1  # exit code of a command that fails with this error


class ConfigError(HelexaError):
    """A setting is wrong, or does not fit this machine.

    The message names the file or variable, and the fix. The exit code is `EX_CONFIG` of BSD's sysexits.h.
    """

    exit_code = 78


class UsageError(ConfigError):
    """A command line option is wrong."""

    exit_code = 2


class SourceError(HelexaError):
    """A model source cannot be parsed, reached or downloaded."""

    def __init__(self, message: str, *, kind: str = "repo_fetch_failed", **details: Any) -> None:
        super().__init__(message)
        # `repo_fetch_failed` (worth a retry), `repo_refused`, `not_cached`, `empty_repo`, `quant_not_found`,
        # `invalid_source`, `disk_full`, `cache_unwritable` or `cache_failed`
        self.kind = kind
        self.details = details  # further fields for the error response of `POST /models/load`


class DoesNotFitError(HelexaError):
    """A model needs more memory than is free."""

    kind = "does_not_fit"  # value of the field `kind` in the error response of `POST /models/load`

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details  # further fields for the error response: memory sizes in MiB


class TensorParallelError(HelexaError):
    """A model cannot be divided among the requested number of ranks."""

    kind = "tensor_parallel_unsupported"  # value of the field `kind` in the error response of `POST /models/load`

    def __init__(
        self, message: str, *, tp_size: int, max_tensor_parallel: int, suggestion: str, **details: Any
    ) -> None:
        super().__init__(message)
        # further fields for the error response: `tp_size`, the requested number of ranks; `max_tensor_parallel`, the
        # largest possible number of ranks; `suggestion`; and others
        self.details = {
            "tp_size": tp_size,
            "max_tensor_parallel": max_tensor_parallel,
            "suggestion": suggestion,
        } | details


class ModelFileError(HelexaError):
    """A model file is corrupt, truncated or unsupported.

    `problem` says what is wrong, `advice` what to do next; `str()` returns both. An empty `advice` is left out.
    """

    advice = "download the model again, or use another file of it"

    # The problem may quote the file's content, so the message is one line of at most 1000 printable characters.
    def __init__(self, problem: str, *, advice: str | None = None) -> None:
        if advice is not None:
            self.advice = advice
        problem = printable(problem[: 2 * _MAX_CHARS])
        space = _MAX_CHARS - len(f"; {self.advice}")
        self.problem = problem if len(problem) <= space else f"{problem[: space - 3]}..."
        super().__init__(self.problem)

    def __str__(self) -> str:
        return f"{self.problem}; {self.advice}" if self.advice else self.problem


class UnsupportedModelError(ModelFileError):
    """A model has an architecture, format or setting that is not supported."""

    advice = "use another model, or update helexa"


class ApiError(HelexaError):
    """An HTTP error response.

    Its body has OpenAI's format: a JSON object `error` with `message`, `type` and `code`.
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
        accept_encoding: str | None = None,
        **extras: Any,
    ) -> None:
        super().__init__(message)
        # Value of the `Accept-Encoding` header. None if the response has no such header.
        self.accept_encoding = accept_encoding
        self.status = status  # HTTP status code
        self.type = type  # value of `error.type`
        self.code = code  # value of `error.code`, or None
        self.param = param  # name of the invalid request field, or None
        # Seconds for the `Retry-After` header, an integer. None if the response has no such header.
        self.retry_after = retry_after
        self.extras = extras  # further fields of `error`

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling."""
        # The default `Exception.__reduce__` would lose the keyword arguments.
        fields = {"type": self.type, "param": self.param, "retry_after": self.retry_after, **self.extras}
        fields["accept_encoding"] = self.accept_encoding
        return partial(ApiError, **fields), (self.status, self.code, str(self))

    def envelope(self) -> dict[str, Any]:
        """Return the JSON body: `{"error": {"message", "type", "code", "param", ...}}`."""
        error = {"message": str(self), "type": self.type, "code": self.code, "param": self.param}
        return {"error": error | self.extras}

    def headers(self) -> dict[str, str]:
        """Return the headers `Retry-After` and `Accept-Encoding`, if they are set."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers if self.accept_encoding is None else headers | {"Accept-Encoding": self.accept_encoding}


def malformed_json(detail: str) -> ApiError:
    """Return the 400 error for a body that is not JSON; `detail` is the syntax error."""
    return ApiError(400, "malformed_json", f"the request body is not valid JSON: {detail}")


def invalid_body(message: str, param: str | None = None) -> ApiError:
    """Return the 400 error for a missing or invalid field, which `param` names."""
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
    message = message or f"'{param}' is not supported; leave it out"
    return ApiError(400, "unsupported_parameter", message, param=param)


def missing_model() -> ApiError:
    """Return the 400 error for a request that names no model."""
    message = "missing 'model' field in request body; GET /v1/models lists the models"
    return ApiError(400, "missing_model_field", message, param="model")


def model_not_found(model: str, hint: str = "") -> ApiError:
    """Return the 404 error for an unknown model. `hint` is added to the message."""
    text = f"model '{model}' not found" + (f"; {hint}" if hint else "")
    return ApiError(404, "model_not_found", text, param="model", model_id=model)


def context_length_exceeded(prompt_tokens: int, limit: int) -> ApiError:
    """Return the 400 error for a prompt that exceeds the context length `limit`."""
    return ApiError(
        400,
        "context_length_exceeded",
        # OpenAI's wording, which coding agents recognize to compact the conversation.
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
        f"{prompt_tokens} tokens. Please reduce the length of the messages.",
        param="messages",
        prompt_len=prompt_tokens,
        max=limit,
    )


def vision_unsupported(model: str) -> ApiError:
    """Return the error for an image in a request to a text-only model."""
    return ApiError(
        400,
        "vision_unsupported",
        f"model '{model}' reads text only, but the request contains an image; remove it, or use a model with vision",
        param="messages",
        model_id=model,
        suggestion="remove the image parts or choose a model with the 'vision' capability",
    )


def service_unavailable(message: str, retry_after: int) -> ApiError:
    """Return the 503 error for a request that may succeed after `retry_after` seconds."""
    return ApiError(503, "service_unavailable", message, type="api_error", retry_after=retry_after)


def overloaded(message: str, retry_after: int, status: int = 503) -> ApiError:
    """Return the error for a request that a full queue or a limit rejects.

    `retry_after` is in seconds.
    """
    return ApiError(status, "rate_limit_exceeded", message, type="rate_limit_error", retry_after=retry_after)


def shutting_down() -> ApiError:
    """Return the error for a request to a server that is shutting down."""
    message = "the server is shutting down; retry when it has started again"
    return ApiError(503, "shutting_down", message, type="api_error", retry_after=15)


def internal_error(message: str = "internal error; see the server's log") -> ApiError:
    """Return the 500 error for an unexpected failure, without a traceback."""
    return ApiError(500, None, message, type="api_error")


def missing_extra(error: BaseException) -> str | None:
    """Return a message that names the missing module and the command that installs it.

    The result is None if `error` was not caused by a missing optional dependency.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ModuleNotFoundError):
        cause = cause.__cause__
    if cause is None or cause.name is None or cause.name.partition(".")[0] == "helexa":
        return None
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(cause.__traceback__)]
    packages = [module.split(".")[1] for module in modules if module.startswith("helexa.")]
    extra = packages[-1] if packages and packages[-1] in _EXTRAS else "all"
    return not_installed(cause.name, extra)


def not_installed(module: str, extra: str) -> str:
    """Return the message that `module` is missing, with a command to install `extra`."""
    return f"{module} is not installed; install it with: {_install_command(f'helexa[{extra}]')}"


def _install_command(requirement: str) -> str:
    """Return the install command of the tool that created this process's environment."""
    environment = Path(sys.prefix)
    if (environment / "uv-receipt.toml").exists():
        return f"uv tool install '{requirement}'"
    if (environment / "pipx_metadata.json").exists():
        return f"pipx install --force '{requirement}'"
    if environment.parent.name.startswith("archive-v"):  # uv keeps the environments of uvx in its cache
        return f"uvx '{requirement}'"
    if find_spec("pip") is None and _created_by_uv(environment):
        return f"uv pip install '{requirement}'"
    return f"pip install '{requirement}'"


def _created_by_uv(environment: Path) -> bool:
    try:
        lines = (environment / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        return False
    return any(line.partition("=")[0].strip() == "uv" for line in lines)


@contextmanager
def explained_extras() -> Iterator[None]:
    """Return a context that converts the error of a missing extra to a `HelexaError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (hint := missing_extra(error)) is None:
            raise
        raise HelexaError(hint) from error
