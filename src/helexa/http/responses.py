"""JSON responses for Starlette routes, and the response of `GET /health/ready`."""

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response


class JsonResponse(Response):
    """A Starlette response with a JSON body, serialized by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return `content` as JSON."""
        return orjson.dumps(content)


def readiness(reasons: Mapping[str, str | None]) -> Response:
    """Return a response with status 200 if all components are ready, else 503.

    `reasons` maps the name of each component to the reason why the component is not ready, or to None if it is ready.
    """
    components = {
        name: {"ready": reason is None} | ({} if reason is None else {"reason": reason})
        for name, reason in reasons.items()
    }
    ready = all(reason is None for reason in reasons.values())
    return JsonResponse({"ready": ready, "components": components}, 200 if ready else 503)
