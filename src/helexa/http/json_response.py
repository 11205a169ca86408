"""JSON as the response of a Starlette route."""

from typing import Any

import orjson
from starlette.responses import Response


class JsonResponse(Response):
    """A response whose content is written as JSON by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return orjson.dumps(content)
