"""Reading the small JSON files that lie beside a model's weights."""

from pathlib import Path
from typing import Any

import orjson

from helexa.core.errors import ModelFileError

_MAX_BYTES = 16 << 20


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; an absent file reads as an empty one.

    Raises:
        ModelFileError: when the file cannot be read, is larger than 16 MiB, or holds no JSON object.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelFileError(f"{path.name} is larger than {_MAX_BYTES >> 20} MiB")
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelFileError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except orjson.JSONDecodeError as error:
        raise ModelFileError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name} does not hold a JSON object")
    return value
