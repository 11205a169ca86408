"""Read untrusted JSON files that accompany weights."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helexa.core.errors import ModelFileError

MAX_JSON_BYTES = 32 << 20
"""Maximum size of a JSON file or header in bytes: larger than any real file, but too small to exhaust memory."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file at `path`.

    Raises:
        ModelFileError: the file cannot be read, is larger than `MAX_JSON_BYTES`, or does not contain a valid JSON
            object.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > MAX_JSON_BYTES:
                raise ModelFileError(f"{path.name}: larger than {MAX_JSON_BYTES >> 20} MiB")
            return parse_json(stream.read(size), path)
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from error


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """Parse `text`, the contents of the file `path`, and return the JSON object.

    Raises:
        ModelFileError: `text` is not a valid JSON object, or an object has duplicate keys.
    """
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelFileError(f"{path.name}: not a JSON object")
    return parsed


def _reject_duplicate_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("a key appears twice")
    return parsed
