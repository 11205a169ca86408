"""JSON objects beside weights, which came with them from outside."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helexa.core.errors import ModelFileError

MAX_JSON_BYTES = 32 << 20
"""Far above any real file's, and low enough that a hostile one cannot exhaust memory."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file at `path`.

    Raises:
        ModelFileError: it cannot be read, is too large, or holds no JSON object.
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
    """The object in `text`, which is of the file at `path`; no key may be there twice.

    Raises:
        ModelFileError: it is no JSON object.
    """
    try:
        parsed = json.loads(text.decode(), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ModelFileError(f"{path.name}: not a JSON object")
    return parsed


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("a key appears twice")
    return parsed
