"""JSON responses for Starlette routes."""

from typing import Any

import orjson
from starlette.responses import Response


class JsonResponse(Response):
    """A Starlette response with a JSON body, serialized by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return `content` as JSON."""
        return orjson.dumps(content)
