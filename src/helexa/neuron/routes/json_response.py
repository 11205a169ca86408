"""JSON as an HTTP response."""

from typing import Any

import orjson
from starlette.responses import Response


def json_response(value: Any, status: int = 200) -> Response:
    """Return a response whose body is `value`, encoded with orjson."""
    return Response(orjson.dumps(value), status, media_type="application/json")
