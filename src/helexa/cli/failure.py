"""Errors of commands and their exit codes."""

from helexa.core.errors import ConfigError, HelexaError, SourceError, UsageError

USAGE = UsageError.exit_code
CONFIG = ConfigError.exit_code
UNREACHABLE = 3
MODEL_NOT_FOUND = 4

_SOURCE_CODES = {
    "repo_fetch_failed": UNREACHABLE,
    "repo_refused": MODEL_NOT_FOUND,
    "not_cached": MODEL_NOT_FOUND,
    "empty_repo": MODEL_NOT_FOUND,
    "quant_not_found": MODEL_NOT_FOUND,
}


class CommandError(HelexaError):
    """A `helexa` command failed. The process prints the message and ends with `exit_code`."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def exit_code(error: HelexaError) -> int:
    """Return the exit code with which a command ends if it failed with `error`."""
    return _SOURCE_CODES.get(error.kind, 1) if isinstance(error, SourceError) else error.exit_code
