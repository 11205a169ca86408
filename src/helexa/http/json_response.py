"""JSON responses of Starlette routes."""

from typing import Any

import orjson
from starlette.responses import Response


class JsonResponse(Response):
    """A response whose content is serialized as JSON by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the serialized content."""
        return orjson.dumps(content)
