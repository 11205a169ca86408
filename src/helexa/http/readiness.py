"""The response of `GET /health/ready`."""

from collections.abc import Mapping

from starlette.responses import Response

from helexa.http.json_response import JsonResponse


def readiness(reasons: Mapping[str, str | None]) -> Response:
    """Return status 200 if all components of a server are ready, else status 503.

    Args:
        reasons: for each component the reason why it is not ready, or None if it is ready.
    """
    components = {
        name: {"ready": reason is None} | ({} if reason is None else {"reason": reason})
        for name, reason in reasons.items()
    }
    ready = all(reason is None for reason in reasons.values())
    return JsonResponse({"ready": ready, "components": components}, 200 if ready else 503)
