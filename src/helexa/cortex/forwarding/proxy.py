"""Forwards one request to a node, and the response back to the client byte for byte."""

import asyncio
import itertools
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable

from helexa.core import tracing
from helexa.core.errors import ApiError, overloaded
from helexa.cortex.fleet.breaker import WARY_SECS
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.forwarding.node_calls import json_object
from helexa.cortex.observability.request_record import UPSTREAM_TIMEOUT, RequestRecord
from helexa.cortex.replies.reply import Reply
from helexa.cortex.requests.body_workers import BodyWorkers
from helexa.cortex.requests.headers import UNBUFFERED, bearer_header, forwarded_headers, returned_headers
from helexa.cortex.requests.request import ClientRequest
from helexa.cortex.routing.router import Outcome, WarmRoute
from helexa.cortex.upstream.client import Upstream
from helexa.cortex.upstream.connection import UpstreamResponse
from helexa.cortex.upstream.errors import ConnectError, LocalConnectError, ReadTimeoutError, UpstreamError
from helexa.cortex.usage.meter import Meter
from helexa.cortex.usage.response_meter import ResponseMeter
from helexa.cortex.usage.token_limit import RESPONSES
from helexa.cortex.usage.usage_filter import UsageFilter
from helexa.http.connections.request_head import Headers

log = logging.getLogger(__name__)

RETRY_BUSY = 2
RETRY_LOCAL = 1

_MAX_ERROR_BYTES = 64 << 10
_CODE = re.compile(r"[\w.-]{1,64}", re.ASCII)
_BUSY = (429, 503)
_KINDS = (b"application/json", b"text/event-stream")

Settle = Callable[[], Awaitable[None]]


class NoResponse(Exception):
    """The node failed or was busy before anything was sent to the client, so the request may be retried.

    Attributes:
        outcome: kind of failure: `unreached`, `busy`, `broken` or `silent`. It decides whether a retry is allowed.
        error_response: error to send to the client if the request is not retried on another node.
    """

    def __init__(self, reason: str, outcome: Outcome, error_response: ApiError) -> None:
        super().__init__(reason)
        self.outcome: Outcome = outcome
        self.error_response = error_response


class Proxy:
    """Forwards requests to nodes and their responses to clients."""

    def __init__(self, upstream: Upstream, fleet: Fleet, body_workers: BodyWorkers) -> None:
        self._upstream = upstream
        self._fleet = fleet
        self._body_workers = body_workers
        self._usage_secret = secrets.token_hex(8)
        self._usage_count = itertools.count()

    async def ask(
        self,
        target: WarmRoute,
        request: ClientRequest,
        response: Reply,
        record: RequestRecord,
        settle: Settle | None,
        *,
        last: bool,
    ) -> None:
        """Forward a request to a node, and forward the node's response to the client.

        Args:
            target: the node.
            request: the parsed request.
            response: the response to the client.
            record: the request record.
            settle: function that charges the request to the client's key, or None for anonymous requests. The end of a
                complete response is sent to the client after this function has returned.
            last: True if the request cannot be retried on another node. A 429 or 503 response of the node is then
                forwarded to the client.

        Raises:
            NoResponse: the node failed before anything was sent to the client, so the request may be retried.
            ApiError: the node's response is incomplete, a timeout expired, or the gateway is out of connections (503).
                The caller must end the client's response with this error.
        """
        node, model = target.node, target.model
        record.node, record.route, record.waited = node, target.reason, time.perf_counter() - record.started
        attributes: tracing.Attributes = {"gen_ai.request.model": model, "helexa.route": target.reason}
        with (
            self._fleet.request(node, model),
            tracing.client_span(record.span, f"node {node}", attributes) as trace_headers,
        ):
            node_response: UpstreamResponse | None = None
            body = await self._body_workers.run_if(request.large, request.body_for, model, target.kind)
            is_neuron = target.kind == "neuron"
            record.target, record.usage_id = target, self._usage_id() if is_neuron and request.metered else ""
            try:
                node_response = await self._upstream.ask(
                    b"POST",
                    target.url,
                    request.path,
                    self._headers(request, record, target, trace_headers),
                    body,
                    is_alive=lambda: self._fleet.is_alive(node),
                    interim=is_neuron and not request.stream,
                )
                first_chunk = await node_response.chunk()
            except LocalConnectError as error:
                log.warning("node=%s not connected: %s", node, error)
                raise overloaded("the gateway is out of connections; try again", RETRY_LOCAL) from error
            except UpstreamError as error:
                self._count_failure(node, model, silent=isinstance(error, ReadTimeoutError))
                if node_response is not None:
                    node_response.close()
                raise NoResponse(_reason(error), _outcome(error), _error_response(error, node)) from error
            except asyncio.CancelledError:
                if node_response is not None:
                    node_response.close()
                raise
            try:
                record.answered = time.perf_counter() - record.started - record.waited
                if _is_from_proxy(node_response):
                    timed_out = node_response.status == 504  # a 504 comes from a proxy between the gateway and the node
                    self._count_failure(node, model, silent=timed_out)
                    reason = f"HTTP {node_response.status} from a proxy or another server"
                    if timed_out:
                        raise NoResponse(reason, "silent", _timed_out(node))
                    raise NoResponse(reason, "broken", _unreachable(node))
                self._fleet.transport_ok(node, model)
                if node_response.status in _BUSY:
                    self._fleet.busy(node, model, _retry_after(node_response))
                    if not last:
                        busy_error = overloaded(f"every node that has model '{model}' is busy", RETRY_BUSY)
                        raise NoResponse(f"HTTP {node_response.status}", "busy", busy_error)
                if node_response.status >= 400:
                    await self._forward_error(node_response, first_chunk, response, record)
                else:
                    await self._relay(node_response, first_chunk, target, request, response, record, settle)
            finally:
                node_response.close()

    def _count_failure(self, node: str, model: str, *, silent: bool) -> None:
        """Report a transport failure to the circuit breaker of this node and model.

        A timeout (`silent`) of a node that still responds to polls is not reported, because perhaps only this request
        is slow.
        """
        if not (silent and self._fleet.is_alive(node)):
            self._fleet.transport_failed(node, model)

    def _usage_id(self) -> str:
        """Return a new unguessable id, under which a node stores the token counts of one request.

        The id consists of a random secret of this process and a counter. A counter is cheaper than a new random number
        for each request.
        """
        return f"{self._usage_secret}{next(self._usage_count):016x}"

    def _headers(
        self, request: ClientRequest, record: RequestRecord, target: WarmRoute, trace_headers: Headers
    ) -> Headers:
        """Return the request headers to send to a node.

        Third-party backends receive no account id, key id or usage id. If `trace_headers` is not empty, it replaces the
        trace context of the client.
        """
        headers = forwarded_headers(request.headers)
        if trace_headers:
            headers = [pair for pair in headers if pair[0] not in tracing.CONTEXT_HEADERS] + trace_headers
        headers.append((b"content-type", b"application/json"))
        headers.append((b"x-request-id", record.request_id.encode()))
        if target.kind != "neuron":
            return headers + bearer_header(self._fleet.bearer(target.node))
        if request.streams_chunks:
            headers.append((b"x-helexa-include-usage", b"prompt" if request.translated else b"1"))
        if record.usage_id:
            headers.append((b"x-helexa-usage-id", record.usage_id.encode()))
        if record.principal is not None:
            headers.append((b"x-helexa-account-id", record.principal.account_id.encode()))
            headers.append((b"x-helexa-key-id", record.principal.key_id.encode()))
        return headers + bearer_header(self._fleet.bearer(target.node))

    async def _relay(
        self,
        node_response: UpstreamResponse,
        chunk: bytes,
        target: WarmRoute,
        request: ClientRequest,
        response: Reply,
        record: RequestRecord,
        settle: Settle | None,
    ) -> None:
        headers = returned_headers(node_response.headers)
        headers.append((b"x-helexa-route", target.reason.encode()))
        streamed = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
        if streamed:
            headers.append(UNBUFFERED)
        record.meter = meter = (ResponseMeter if record.api == RESPONSES else Meter)(streamed=streamed)
        meter.feed(chunk, time.perf_counter())
        next_chunk = None if streamed else await self._next_or_settle(node_response, record, settle)
        hides_usage = streamed and request.streams_chunks and not request.includes_usage
        usage_filter = UsageFilter() if hides_usage else None
        if not response.started:
            record.status = node_response.status
            await response.start(node_response.status, headers, streamed=streamed)
        else:
            record.status = 200
        while chunk and next_chunk != b"":  # the last chunk of a non-streamed response is sent with its end
            if streamed and settle is not None and meter.ended(len(chunk)):
                await settle()
            await response.write(chunk if usage_filter is None else usage_filter.feed(chunk))
            chunk = await self._next_chunk(node_response, record) if next_chunk is None else next_chunk
            if chunk:
                meter.feed(chunk, time.perf_counter())
                if not streamed:
                    next_chunk = await self._next_or_settle(node_response, record, settle)
        await response.finish(chunk if usage_filter is None else usage_filter.flush())

    async def _next_or_settle(
        self, node_response: UpstreamResponse, record: RequestRecord, settle: Settle | None
    ) -> bytes:
        """Return the next chunk of a non-streamed response. At its end, charge the request and return empty bytes."""
        chunk = b"" if node_response.complete else await self._next_chunk(node_response, record)
        if not chunk and settle is not None:
            await settle()
        return chunk

    async def _next_chunk(self, node_response: UpstreamResponse, record: RequestRecord) -> bytes:
        try:
            return await node_response.chunk()
        except UpstreamError as error:
            is_silent = isinstance(error, ReadTimeoutError)
            self._count_failure(record.node, record.model, silent=is_silent)
            log.warning("node=%s model=%s response incomplete: %s", record.node, record.model, _reason(error))
            if is_silent:
                raise _timed_out(record.node) from error
            raise ApiError(
                502, "upstream_connection_error", "the node's response ended before it was complete", type="api_error"
            ) from error

    async def _forward_error(
        self, node_response: UpstreamResponse, chunk: bytes, response: Reply, record: RequestRecord
    ) -> None:
        """Forward a node's error response to the client.

        If the response to the client has already begun, or the node's error has no message, raise the error instead.
        The gateway logs the error's status and code. It does not log the message, which may quote the prompt.
        """
        body = bytearray()
        while chunk and len(body) <= _MAX_ERROR_BYTES:
            body += chunk
            chunk = await self._next_chunk(node_response, record)
        record.failed = True
        record.status = record.status or node_response.status
        error = _error_fields(bytes(body))
        record.code = _code(error)
        log.info("node=%s rejected the request: status=%d code=%s", record.node, node_response.status, record.code)
        if "message" not in error:
            raise ApiError(
                node_response.status, "upstream_error", f"upstream returned {node_response.status}", type="api_error"
            )
        if response.started:
            raise ApiError(node_response.status, record.code, error["message"], type=error.get("type") or "api_error")
        headers = [header for header in returned_headers(node_response.headers) if header[0] != b"content-length"]
        await response.start(node_response.status, [*headers, (b"content-length", b"%d" % len(body))], streamed=False)
        await response.finish(bytes(body))


def _is_from_proxy(node_response: UpstreamResponse) -> bool:
    """Return whether the response comes from a server other than the node, such as a proxy in front of the node."""
    if node_response.status >= 400:
        return node_response.status in (502, 504)
    kinds = [value for name, value in node_response.headers if name == b"content-type"]
    return node_response.status != 200 or not kinds or not kinds[0].lower().startswith(_KINDS)


def _error_fields(body: bytes) -> dict[str, str]:
    """Return the string fields of the `error` object in a node's error body, or an empty dict without this object."""
    error = json_object(body).get("error")
    return {name: text for name, text in error.items() if isinstance(text, str)} if isinstance(error, dict) else {}


def _code(error: dict[str, str]) -> str | None:
    """Return the `code` of a node's error, or None if the code is missing or does not match `_CODE`."""
    code = error.get("code", "")
    return code if _CODE.fullmatch(code) else None


def _retry_after(node_response: UpstreamResponse) -> float:
    """Return for how many seconds the router should prefer other nodes after a busy response.

    The result is the value of the `Retry-After` header, or `WARY_SECS` if the header is missing.
    """
    text = next((value for name, value in node_response.headers if name == b"retry-after"), b"")
    return float(text) if text.isdigit() and len(text) < 6 else WARY_SECS


def _outcome(error: UpstreamError) -> Outcome:
    return (
        "unreached"
        if isinstance(error, ConnectError)
        else "silent"
        if isinstance(error, ReadTimeoutError)
        else "broken"
    )


def _reason(error: UpstreamError) -> str:
    return f"{type(error).__name__} ({error})"


def _error_response(error: UpstreamError, node: str) -> ApiError:
    return _timed_out(node) if isinstance(error, ReadTimeoutError) else _unreachable(node)


def _timed_out(node: str) -> ApiError:
    return ApiError(504, UPSTREAM_TIMEOUT, f"node '{node}' sent no bytes for too long", type="api_error")


def _unreachable(node: str) -> ApiError:
    return ApiError(502, "upstream_connection_error", f"node '{node}' did not respond", type="api_error")
