"""Read small JSON files that accompany a model's weights."""

from pathlib import Path
from typing import Any

import orjson

from helexa.core.errors import ModelFileError

_MAX_BYTES = 16 << 20
_MAX_VALUES = 1 << 22


def read_object(path: Path, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object in the file at `path`. If the file does not exist, return an empty object.

    Raises:
        ModelFileError: the file cannot be read, is larger than `max_bytes`, has too many values, or does not contain a
            valid JSON object.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise ModelFileError(f"{path.name} is larger than {max_bytes >> 20} MiB")
        data = path.read_bytes()
        # An empty list takes two bytes in the file and sixty bytes in memory.
        if sum(map(data.count, (b",", b"[", b"{"))) > _MAX_VALUES:
            raise ModelFileError(f"{path.name} has more than {_MAX_VALUES} values")
        value = orjson.loads(data)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelFileError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except orjson.JSONDecodeError as error:
        raise ModelFileError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name} does not contain a JSON object")
    return value
