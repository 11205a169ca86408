"""Forwards a request to a node, and the response back to the client byte for byte."""

import itertools
import logging
import re
import secrets
import time
from contextlib import nullcontext
from functools import partial

from helexa.core import tracing
from helexa.core.errors import ApiError, overloaded
from helexa.core.logs import quoted
from helexa.cortex.backends.answer import NodeResponse
from helexa.cortex.fleet.fleet import Fleet, RunningRequest
from helexa.cortex.fleet.node_client import bearer_header
from helexa.cortex.forwarding.backend_requests_and_refusals import BackendAttempt, BackendRequests
from helexa.cortex.forwarding.client_reply_and_error_events import Reply
from helexa.cortex.forwarding.headers import forwarded_headers
from helexa.cortex.forwarding.relay_and_keep_alive import Settle, SilenceComments, forward_error, read_chunk, relay
from helexa.cortex.forwarding.request import ClientRequest
from helexa.cortex.forwarding.request_body_limit_and_workers import BodyWorkers
from helexa.cortex.forwarding.retry import (
    CONTENT_ERRORS,
    NoResponse,
    count_failure,
    is_from_proxy,
    no_connection,
    reject_proxy_response,
)
from helexa.cortex.request_record import RequestRecord
from helexa.cortex.routing import WarmRoute, prefix_name
from helexa.cortex.upstream.client import Upstream
from helexa.cortex.upstream.connection_and_timeouts import (
    LocalConnectError,
    ReadTimeoutError,
    UpstreamError,
    UpstreamResponse,
)
from helexa.cortex.upstream.error_responses import read_error
from helexa.http.headers import Headers

log = logging.getLogger(__name__)

RETRY_LOCAL = 1

_ERROR_START_BYTES = 64
_ERROR_START = re.compile(rb'\s*(?:event: ?error\r?\n)?(?:data: ?)?\{\s*"error"\s*:\s*[{"]')

_NO_COMMENTS = nullcontext()


class Proxy:
    """Forwards requests to nodes and their responses to clients."""

    def __init__(self, upstream: Upstream, fleet: Fleet, body_workers: BodyWorkers) -> None:
        self._upstream = upstream
        self._fleet = fleet
        self._body_workers = body_workers
        self._backends = BackendRequests(body_workers)
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
            settle: function that charges the request to the client's key, or None for anonymous requests. The end of a
                complete response is sent to the client after this function has returned.
            last: True if the request cannot be retried on another node. An error response of the node is then forwarded
                to the client.

        Raises:
            NoResponse: the node failed before any of its bytes were sent to the client, so the request may be retried.
                This can happen even if `last` is true.
            ApiError: the request failed in another way, for example by an incomplete response or a timeout, or because
                the gateway is out of connections (503). The caller must end the client's response with this error.
        """
        node, model, requester, is_neuron = target.node, target.model, record.requester, target.kind == "neuron"
        record.node, record.route, record.waited = node, target.reason, time.perf_counter() - record.started
        attributes: tracing.Attributes = {"gen_ai.request.model": model, "helexa.route": target.reason}
        with (
            self._fleet.request(node, model, requester) as running,
            tracing.client_span(record.span, f"node {node}", attributes) as trace_headers,
            _NO_COMMENTS if is_neuron or not request.stream else SilenceComments(response),
        ):
            if request.large:
                body = await self._body_workers.run(request.body_for, model, target.kind)
            else:
                body = request.body_for(model, target.kind)
            record.target, record.usage_id = target, self._usage_id() if is_neuron and request.metered else ""
            headers = self._headers(request, record, target, trace_headers)
            attempt: BackendAttempt | None = None
            node_response: NodeResponse
            try:
                if is_neuron:
                    node_response, first_chunk = await self._send(target, request, running, headers, request.path, body)
                else:
                    send = partial(self._send, target, request, running, headers)
                    by_effort = self._thinks_by_effort(target)
                    node_response, first_chunk, attempt = await self._backends.send(
                        target.url, model, request, body, send, thinks_by_effort=by_effort
                    )
            except UpstreamError as error:
                raise self._without_response(error, record) from error
            try:
                record.answered = time.perf_counter() - record.started - record.waited
                if is_from_proxy(node_response, target.kind):
                    reject_proxy_response(self._fleet, node_response, record)
                self._fleet.transport_ok(node, model, requester.client)
                if node_response.status >= 400:
                    await forward_error(self._fleet, node_response, first_chunk, response, record, last=last)
                    return
                if attempt is not None and attempt.is_converted:
                    node_response = self._converted(attempt, node_response, first_chunk, model, request, record)
                    first_chunk = await self._first_converted(node_response, record, last=last)
                elif not last and b'"error"' in first_chunk[:_ERROR_START_BYTES] and _ERROR_START.match(first_chunk):
                    # Some servers answer 200 with an error as the body or first event. Nothing was sent to the client
                    # yet, so another node can answer.
                    self._fleet.busy(node, model)
                    raise NoResponse(
                        "the node answered HTTP 200 with an error in the body",
                        "failed",
                        read_error(502, _json(first_chunk)),
                    )
                # This node answers, so the request was not the cause of the errors of the nodes that were tried before.
                # These errors therefore count against the nodes.
                for failed_node in record.failed_nodes:
                    self._fleet.struck(failed_node, model, requester)
                record.failed_nodes.clear()
                try:
                    await relay(self._fleet, node_response, first_chunk, target, request, response, record, settle)
                except ApiError as error:
                    # Statuses below 500 are errors of the client, and 503 is an error of the ledger. They do not count
                    # against the node.
                    if error.status >= 500 and error.status != 503:
                        self._fleet.struck(node, model, requester)
                    raise
                if record.meter is not None and record.meter.failed():
                    self._fleet.struck(node, model, requester)
                else:
                    self._fleet.served(node, model, requester)
            finally:
                node_response.close()

    def _thinks_by_effort(self, target: WarmRoute) -> bool:
        """Return whether the backend `target` is Ollama with a model that can think."""
        nodes = (node for node in self._fleet.view().nodes if node.name == target.node)
        info = next((node.models.get(target.model) for node in nodes), None)
        return info is not None and info.harness == "ollama" and info.reasoning is True

    async def _send(
        self,
        target: WarmRoute,
        request: ClientRequest,
        running: RunningRequest,
        headers: Headers,
        path: str,
        body: bytes,
    ) -> tuple[UpstreamResponse, bytes]:
        """Send a request, and return the response and the first bytes of its body."""
        node_response = await self._upstream.ask(
            b"POST",
            target.url,
            path,
            headers,
            body,
            is_alive=lambda: self._fleet.is_alive(target.node),
            # Without interim responses, a long whole answer looks like a hung connection. Third-party backends do not
            # support interim responses.
            interim=target.kind == "neuron" and not request.stream,
        )
        running.response = node_response
        try:
            return node_response, await node_response.chunk()
        # Also close the connection if the request is canceled: this makes the node stop generating.
        except BaseException:
            node_response.close()
            raise

    def _without_response(self, error: UpstreamError, record: RequestRecord) -> Exception:
        """Return the exception to raise after an attempt in which no response began."""
        if isinstance(error, LocalConnectError):
            log.warning(
                "no connection opened node=%s error=%s; raise the limit of open files or of local ports on the gateway",
                *(record.node, quoted(error)),
            )
            return overloaded("the gateway cannot open another connection to a node; try again", RETRY_LOCAL)
        count_failure(self._fleet, record, silent=isinstance(error, ReadTimeoutError))
        return no_connection(error, record.node)

    def _converted(
        self,
        attempt: BackendAttempt,
        node_response: NodeResponse,
        first_chunk: bytes,
        model: str,
        request: ClientRequest,
        record: RequestRecord,
    ) -> NodeResponse:
        """Return the response of a third-party backend, converted to OpenAI's format."""

        def on_estimate() -> None:
            record.estimated = True

        return attempt.convert(
            node_response,
            first_chunk,
            model=model,
            input_tokens=request.prompt_estimate,
            streamed=request.stream,
            on_estimate=on_estimate,
        )

    async def _first_converted(self, answer: NodeResponse, record: RequestRecord, *, last: bool) -> bytes:
        try:
            return await read_chunk(self._fleet, answer, record)
        except ApiError as error:
            # `read_chunk` has already counted a transport failure. An error in the request's content does not count
            # against the node.
            if isinstance(error.__cause__, UpstreamError) or error.status in CONTENT_ERRORS:
                raise
            if last:
                self._fleet.struck(record.node, record.model, record.requester)
                raise
            self._fleet.busy(record.node, record.model)
            raise NoResponse("the node answered HTTP 200 with an error in the body", "failed", error) from error

    def _usage_id(self) -> str:
        """Return a new unguessable id, under which a node stores token counts."""
        return f"{self._usage_secret}{next(self._usage_count):016x}"

    def _headers(
        self, request: ClientRequest, record: RequestRecord, target: WarmRoute, trace_headers: Headers
    ) -> Headers:
        """Return the request headers to send to a node.

        If `trace_headers` is not empty, it replaces the trace context of the client.
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
        if record.affinity_key is not None:
            headers.append((b"x-helexa-prefix", prefix_name(record.affinity_key).encode()))
        if record.principal is not None:
            headers.append((b"x-helexa-account-id", record.principal.account_id.encode()))
            headers.append((b"x-helexa-key-id", record.principal.key_id.encode()))
        return headers + bearer_header(self._fleet.bearer(target.node))


def _json(chunk: bytes) -> bytes:
    """Return the JSON of the first event of a stream, or of a whole response."""
    return chunk[chunk.find(b"{") :].partition(b"\n\n")[0]
