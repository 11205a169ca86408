"""CORS headers, which tell browsers which web pages may call the API."""

from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_METHODS = ("GET", "POST", "PATCH", "DELETE")
_EXPOSED = (
    "retry-after",
    "x-request-id",
    "x-helexa-route",
    "x-helexa-advice",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
)


def with_cors(app: ASGIApp, origins: Iterable[str]) -> ASGIApp:
    """Wrap `app` in a middleware that adds CORS headers for web pages of `origins`.

    The middleware answers preflight requests itself, so they need no API key. Cookies and the browser's HTTP
    authentication are never allowed, so pages must send their API key in a header.
    """
    return CORSMiddleware(
        app,
        allow_origins=[origin.rstrip("/") for origin in origins],
        allow_methods=_METHODS,
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )
