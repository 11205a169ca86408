"""What the node is and how it is: `/version`, `/discovery`, `/health`."""

import os
import platform
import sys

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helexa import __version__
from helexa.neuron.discovery import discover, torch_version


def json_response(content: object, status: int = 200) -> Response:
    """`content` as a JSON response."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def version(request: Request) -> Response:
    """`GET /version`: what was built, of what."""
    sha = os.environ.get("HELEXA_BUILD_SHA", "unknown")
    return json_response(
        {
            "package_version": __version__,
            "git_sha": sha[:7],
            "git_sha_long": sha,
            "python_version": platform.python_version(),
            "torch_version": torch_version(),
            "target": f"{platform.machine()}-{sys.platform}",
        }
    )


async def discovery(request: Request) -> Response:
    """`GET /discovery`: facts that do not change while the process lives."""
    facts = discover().model_copy(update={"max_prompt_tokens": request.app.state.max_prompt_tokens})
    return json_response(facts.json_dict())


async def health(request: Request) -> Response:
    """`GET /health`: readings, activation and load."""
    return json_response(request.app.state.health.report().json_dict())


routes = [
    Route("/version", version),
    Route("/discovery", discovery),
    Route("/health", health),
]
