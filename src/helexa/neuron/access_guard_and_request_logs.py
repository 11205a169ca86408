"""ASGI middleware: request ids and logs, access checks, 102 responses."""

import asyncio
import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helexa.core import tracing
from helexa.core.address import is_loopback
from helexa.core.errors import ApiError
from helexa.core.logs import request_id, tell
from helexa.core.node_reports import CHECK_KEY
from helexa.http import headers
from helexa.http.headers import Headers, host_and_origin, is_reserved_name, is_same_origin, without_port
from helexa.http.request_cycle_and_disconnects import INTERIM
from helexa.neuron.config import NeuronConfig
from helexa.neuron.requests import request_and_run_records
from helexa.neuron.requests.metrics import Metrics
from helexa.neuron.requests.request_and_run_records import RequestRecord, UsageRecords
from helexa.neuron.routes.replies_disconnects_and_errors import error_response, log_error_response

log = logging.getLogger("helexa.neuron.requests")

# Status in logs, as in nginx, of a request whose client has disconnected. No client receives it.
CLIENT_CLOSED_REQUEST = 499
_POLLED = frozenset(
    {
        *("/health", "/health/ready", "/metrics", "/discovery", "/version"),
        *("/models", "/models/local", "/models/pulls"),
    }
)

_OPEN = ("/health", "/health/ready")

INTERIM_HEADER = b"x-helexa-keep-alive"
MIN_SECS = 1
MAX_SECS = 300

_VALUE = re.compile(rb"(\d{1,6})(?:\s*;\s*from=(\S+))?")


class RequestMiddleware:
    """Assigns request ids; logs and counts requests and their token usage."""

    def __init__(self, app: ASGIApp, metrics: Metrics, usage: UsageRecords) -> None:
        self._app = app
        self._metrics = metrics
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request; log and count it when the response is complete."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        new_id = headers.request_id(scope["headers"])
        request_id.set(new_id)
        record = RequestRecord(scope["method"], scope["path"])
        if record.method == "POST":  # most GET requests only poll the node's state, and are not traced
            record.prefix_key = request_and_run_records.prefix_key(scope["headers"])
            record.span = tracing.server_span(f"{record.method} {record.path}", scope["headers"])
        request_and_run_records.begin(record)
        usage_id = self._usage.begin(scope["headers"])

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", new_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            if usage_id:
                self._usage.end(usage_id, record.runs)
            self._end(record, scope)

    def _end(self, record: RequestRecord, scope: Scope) -> None:
        record.status = record.status or CLIENT_CLOSED_REQUEST
        self._metrics.observe(record, scope.get("endpoint"))
        tracing.end_server_span(
            record.span,
            record.status,
            {
                "http.request.method": record.method,
                "url.path": record.path,
                "error.type": record.error_codes[0] if record.error_codes else None,
                "helexa.request_id": request_id.get(),
            },
        )
        # Runs (the generation of answers) and errors write log lines themselves.
        if not record.runs and not record.error_codes:
            quiet = record.status < 400 and record.path in _POLLED
            tell(
                log,
                logging.DEBUG if quiet else logging.INFO,
                "answered",
                method=record.method,
                path=record.path,
                status=record.status,
                duration_ms=round(record.duration * 1000),
            )


class AccessGuard:
    """Rejects requests without permission with status 401 or 403.

    If the node has an `api_key`, all requests except `GET` and `HEAD` of `/health` and `/health/ready` need this key.

    If the node has no `api_key`, it rejects requests that web pages of other sites send through a browser (403):

    * Requests with an `Origin` header other than the node's own origin. Only browsers send `Origin`.
    * If the node listens on a loopback address: requests with an unknown name in the `Host` header.
    * If the node listens on a network address: requests that have an unknown name in `Host` and also have an `Origin`.
      Without `Origin`, any name is permitted, because gateways may reach the node by any DNS name. An attacker who uses
      DNS rebinding still cannot change anything, because browsers send `Origin` with every POST and DELETE.
    """

    def __init__(self, app: ASGIApp, config: NeuronConfig) -> None:
        self._app = app
        self.configure(config)

    def configure(self, config: NeuronConfig) -> None:
        """Check all later requests against the API key and host names of `config`."""
        self._key = config.api_key.get_secret_value().encode() if config.api_key else None
        self._checks_every_host = is_loopback(config.host)
        names = ("localhost", socket.gethostname(), config.host, *config.allowed_hosts)
        self._names = frozenset(name.lower().encode() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or send an error if it is not permitted."""
        error = self._error(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        if error.status == 401 and _bearer(scope["headers"]).startswith(CHECK_KEY.encode()):
            # No failure, and therefore no warning: before a gateway adds a node, it sends a wrong key on purpose, and
            # expects that the node rejects it.
            tell(log, logging.INFO, "gateway checks that a key is required", path=scope["path"])
        else:
            log_error_response(scope["path"], error)
        await error_response(error)(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        if self._key is not None:
            is_open = scope["path"] in _OPEN and scope["method"] in ("GET", "HEAD")
            return None if is_open or hmac.compare_digest(_bearer(scope["headers"]), self._key) else _unauthorized()
        host, origin = host_and_origin(scope["headers"])
        name = without_port(host).removesuffix(b".")  # DNS permits the dot at the end of a complete name
        if (origin or self._checks_every_host) and name and not self._knows(name):
            return _unknown_host(name)
        if origin and not is_same_origin(origin, host):
            return _foreign_origin(origin)
        return None

    def _knows(self, name: bytes) -> bool:
        # An IP address cannot be rebound to another machine, as a name can.
        return name in self._names or is_reserved_name(name) or _is_address(name)


def _is_address(name: bytes) -> bool:
    try:
        ipaddress.ip_address(name.decode("ascii").removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _bearer(headers: Headers) -> bytes:
    for name, value in headers:
        scheme, _, secret = value.strip().partition(b" ")
        if name == b"authorization" and scheme.lower() == b"bearer":
            return secret.strip()
    return b""


def _unauthorized() -> ApiError:
    return ApiError(401, "invalid_api_key", "this node requires its api_key; send 'Authorization: Bearer <key>'")


def _unknown_host(name: bytes) -> ApiError:
    shown = name.decode("latin-1")[:200]
    return ApiError(
        403,
        "host_not_allowed",
        f"the Host header '{shown}' is not a known name of this node; add the name to allowed_hosts in neuron.toml",
    )


def _foreign_origin(origin: bytes) -> ApiError:
    shown = origin.decode("latin-1")[:200]
    return ApiError(
        403,
        "origin_not_allowed",
        f"web pages of '{shown}' may not use this node; use a gateway with cors_origins, or set api_key in neuron.toml",
    )


class Interim:
    """Sends `102 Processing` at intervals before the final response, on request.

    The client sends the header `x-helexa-keep-alive: SECONDS` or `x-helexa-keep-alive: SECONDS; from=HOST:PORT`. `from`
    is the client's own address on the connection. If it differs from the address that the node sees, there is a proxy
    between them. The node then sends no 102, because some proxies (nginx 1.22) mistake a 102 for the final response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, and send 102 responses meanwhile."""
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
    """Return the seconds between 102 responses; None if the node must not send any.

    The result is at least `MIN_SECS` and at most `MAX_SECS`.
    """
    for name, value in scope["headers"]:
        if name == INTERIM_HEADER:
            wish = _VALUE.fullmatch(value.strip())
            if wish is None or INTERIM not in scope.get("extensions", ()):
                return None
            host, port = scope["client"]
            if wish[2] is not None and wish[2] != f"{host}:{port}".encode():
                return None
            return min(max(int(wish[1]), MIN_SECS), MAX_SECS)
    return None


class _Timer:
    """Calls `send` every `secs` seconds, until `send` returns False or `stop` runs."""

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
