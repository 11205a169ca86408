"""The API key of the gateway that `helexa up` starts."""

from pathlib import Path

from helexa.cli.failure import USAGE, CommandError
from helexa.cli.local.state_folder import write_private
from helexa.cortex.access.key import MAX_SECRET_BYTES, new_secret

_SHORTEST = 8


def checked_key(text: str) -> str:
    """Check that `text` is a valid API key, and return it.

    Raises:
        CommandError: the key is too short, too long, or cannot be sent in an HTTP header.
    """
    if not (text.isascii() and text.isprintable() and " " not in text):
        raise CommandError("--api-key must be printable ASCII without blanks", USAGE)
    if not _SHORTEST <= len(text) <= MAX_SECRET_BYTES:
        raise CommandError(f"--api-key must have {_SHORTEST} to {MAX_SECRET_BYTES} characters", USAGE)
    return text


def generated_key(folder: Path) -> str:
    """Return the API key that is stored in `folder`. If there is none, generate and store a key.

    Raises:
        CommandError: the stored key is invalid.
    """
    path = folder / "api_key"
    if path.exists():
        try:
            return checked_key(path.read_text(encoding="utf-8").strip())
        except (CommandError, UnicodeDecodeError):
            raise CommandError(f"{path} holds no API key; remove it to have one generated") from None
    key = new_secret().get_secret_value()
    write_private(path, key + "\n")
    return key
