"""CORS: which web pages may call the API."""

import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helexa.core.errors import ApiError
from helexa.cortex.refusal import refusal

_METHODS = b"GET, POST, PATCH, DELETE"
_REMEMBERED_SECS = b"600"
_EXPOSED = (
    b"retry-after, x-request-id, x-helexa-route, x-helexa-advice, x-ratelimit-limit-requests, "
    b"x-ratelimit-remaining-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens"
)
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{1,2048}")


class Cors:
    """Lets pages of some origins call the application behind; it stands before authentication.

    Cookies and the browser's own credentials are never allowed: keys travel in headers that the page sets.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight, or mark the answer of the application."""
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin = headers.get(b"origin")
        if origin is None:
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await self._preflight(origin, headers)(scope, receive, send)
        else:
            await self._app(scope, receive, self._marking(send, origin))

    def _allows(self, origin: bytes) -> bool:
        return origin in self._origins or b"*" in self._origins

    def _preflight(self, origin: bytes, headers: dict[bytes, bytes]) -> ASGIApp:
        if not self._allows(origin):
            return refusal(ApiError(403, "origin_not_allowed", "this origin is not in gateway.cors_origins"))
        asked = headers.get(b"access-control-request-headers", b"")
        granted = [
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", asked if _HEADER_NAMES.fullmatch(asked) else b"authorization"),
            (b"access-control-max-age", _REMEMBERED_SECS),
            (b"vary", b"Origin, Access-Control-Request-Headers"),
        ]

        async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 204, "headers": granted})
            await send({"type": "http.response.body", "body": b""})

        return answer

    def _marking(self, send: Send, origin: bytes) -> Send:
        marks = [(b"vary", b"Origin")]
        if self._allows(origin):
            marks += [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED)]

        async def marking(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [pair for pair in message.get("headers", []) if not pair[0].startswith(b"access-control-")]
                message = {**message, "headers": own + marks}
            await send(message)

        return marking
