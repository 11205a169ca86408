"""Middleware that assigns a request id to every request, logs the request and counts it in the metrics."""

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helexa.core import tracing
from helexa.core.logs import request_id, tell
from helexa.http.connections import request_head
from helexa.neuron.requests import request_record
from helexa.neuron.requests.metrics import Metrics
from helexa.neuron.requests.request_record import RequestRecord
from helexa.neuron.requests.usage_records import UsageRecords

log = logging.getLogger("helexa.neuron.requests")

CLIENT_CLOSED_REQUEST = 499
_POLLED = frozenset({"/health", "/health/ready", "/models", "/metrics", "/discovery", "/version"})


class RequestMiddleware:
    """ASGI middleware that assigns request ids, logs and counts requests, and records their token usage.

    It wraps all other middleware, so it also sees requests that are rejected before they reach a route.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, usage: UsageRecords) -> None:
        self._app = app
        self._metrics = metrics
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request to the application. Log and count the request when the response is complete."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        new_id = request_head.request_id(scope["headers"])
        request_id.set(new_id)
        record = RequestRecord(scope["method"], scope["path"])
        if record.method == "POST":  # GET requests are polls
            record.span = tracing.server_span(f"{record.method} {record.path}", scope["headers"])
        request_record.begin(record)
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
