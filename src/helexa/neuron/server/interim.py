"""Interim `102 Processing` responses, which the node sends as keep-alive signals during long requests.

A client requests them with the header `x-helexa-keep-alive: SECONDS` or `x-helexa-keep-alive: SECONDS; from=HOST:PORT`.
`from` is the client's own address on the connection. If it differs from the address that the node sees, there is a
proxy between client and node. The node then sends no 102, because some proxies (such as nginx 1.22) mistake a 102 for
the final response.
"""

import asyncio
import re
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from helexa.http.connections.request_cycle import INTERIM

HEADER = b"x-helexa-keep-alive"
MIN_SECS = 1
MAX_SECS = 300

_VALUE = re.compile(rb"(\d{1,6})(?:\s*;\s*from=(\S+))?")


class Interim:
    """ASGI middleware that sends `102 Processing` responses before the final response if the client requests them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request to the application, and send 102 responses at the requested interval meanwhile."""
        secs = interval_secs(scope) if scope["type"] == "http" else None
        if secs is None:
            await self._app(scope, receive, send)
            return
        timer = _Timer(secs, scope["extensions"][INTERIM])
        try:
            await self._app(scope, receive, send)
        finally:
            timer.stop()


def interval_secs(scope: Scope) -> float | None:
    """Return the seconds between 102 responses that a request's header asks for; None if the node must send none.

    The result is at least `MIN_SECS` and at most `MAX_SECS`.
    """
    for name, value in scope["headers"]:
        if name == HEADER:
            wish = _VALUE.fullmatch(value.strip())
            if wish is None or INTERIM not in scope.get("extensions", ()):
                return None
            host, port = scope["client"]
            if wish[2] is not None and wish[2] != f"{host}:{port}".encode():
                return None
            return min(max(int(wish[1]), MIN_SECS), MAX_SECS)
    return None


class _Timer:
    """Calls the function `send` every `secs` seconds until `send` returns False or `stop` is called."""

    def __init__(self, secs: float, send: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._secs = secs
        self._send = send
        self._handle = self._loop.call_later(secs, self._ring)

    def stop(self) -> None:
        self._handle.cancel()

    def _ring(self) -> None:
        if self._send():
            self._handle = self._loop.call_later(self._secs, self._ring)
