"""Why a command ends without having done its work."""

from helexa.core.errors import HelexaError

USAGE = 2
UNREACHABLE = 3
MODEL_NOT_FOUND = 4


class CommandError(HelexaError):
    """A command failed; `exit_code` is what the process ends with."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
