"""CORS: which web pages may call the API."""

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
    """Return `app` with CORS headers for web pages of `origins`.

    Preflight requests are answered without authentication.

    Cookies and HTTP authentication of the browser are never allowed: pages must send their key in a header.
    """
    return CORSMiddleware(
        app,
        allow_origins=[origin.rstrip("/") for origin in origins],
        allow_methods=_METHODS,
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )
