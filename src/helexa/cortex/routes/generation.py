"""The generation endpoints, and the stored responses of the Responses API."""

import asyncio
import logging
import time
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from helexa.core import logs, tracing
from helexa.core.errors import ApiError, internal_error, shutting_down, unsupported_parameter
from helexa.cortex.access.rate_limiter import RateLimitPermit
from helexa.cortex.anthropic.reply import AnthropicReply
from helexa.cortex.fleet.node_errors import NodeError
from helexa.cortex.forwarding.client_reply_and_error_events import Reply, ResponseReply
from helexa.cortex.forwarding.request import ClientRequest, parse_request
from helexa.cortex.forwarding.request_body_limit_and_workers import BodyWorkers, is_large, read_body
from helexa.cortex.gateway import Gateway
from helexa.cortex.request_record import RequestRecord
from helexa.cortex.routes.body_translation import read_large_request, read_message
from helexa.cortex.serve_request import serve
from helexa.http.headers import Headers, request_id, require_json
from helexa.http.request_cycle_and_disconnects import ClientDisconnected, DisconnectGuard

log = logging.getLogger(__name__)
requests = logging.getLogger("helexa.cortex.requests")


class Generation:
    """ASGI endpoint of the generation routes whose requests need no translation."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and write its record exactly once on every code path."""
        gateway: Gateway = scope["app"].state.gateway
        with gateway.drain:
            await self._serve(gateway, scope, receive, send)

    async def _serve(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        record = RequestRecord(request_id(headers), scope["path"], gateway.proxies.client(scope))
        trusted = gateway.proxies.trusts(scope["client"][0]) if scope.get("client") else False
        record.span = tracing.server_span(f"POST {record.api}", headers if trusted else ())
        logs.request_id.set(record.request_id)
        response = self.response(send, record.request_id)
        response.headers.append((b"x-request-id", record.request_id.encode()))
        failure: ApiError | None = None
        try:
            gateway.drain.check()
            record.principal = gateway.authenticator.admit(headers)
            self.check(gateway, headers)
            with gateway.rate_limiter.enter(record.principal) as permit:
                body = await read_body(receive, headers, gateway.max_body_bytes)
                record.read = time.perf_counter()
                with scope["extensions"][DisconnectGuard.NAME]:
                    await self.answer(gateway, headers, body, response, record, permit)
        except ClientDisconnected:
            record.client_gone = True
        except ApiError as error:
            failure = error
        except asyncio.CancelledError:  # only the server cancels this task, when its grace period for open streams ends
            failure = shutting_down()
        except Exception:
            log.exception(
                "request failed with an internal error path=%s; the client gets 500 or an incomplete response",
                record.api,
            )
            failure = internal_error()
        if failure is not None:
            record.failed = True
            record.status = record.status or failure.status
            record.code = failure.code
        record.end()
        gateway.observe(record)
        log_level = logging.INFO if record.failed or record.client_gone else logging.DEBUG
        if requests.isEnabledFor(log_level):
            logs.tell(requests, log_level, "answered", **record.facts())
        record.end_span()
        if failure is not None:
            await response.abort(failure)

    def check(self, gateway: Gateway, headers: Headers) -> None:
        """Reject a request by its headers: the content type must be JSON."""
        require_json(headers)

    def response(self, send: Send, request_id: str) -> Reply:
        """Return the `Reply` that sends the response in the format of the API."""
        return Reply(send)

    async def answer(
        self,
        gateway: Gateway,
        headers: Headers,
        body: bytes,
        response: Reply,
        record: RequestRecord,
        permit: RateLimitPermit,
    ) -> None:
        """Parse the request body, and serve the request.

        Raises:
            ApiError: the request was rejected or failed. The caller ends the response with this error.
        """
        request = await self.parse(gateway.body_workers, record.api, headers, body, response)
        await serve(gateway, request, response, record, permit)

    async def parse(
        self, workers: BodyWorkers, path: str, headers: Headers, body: bytes, response: Reply
    ) -> ClientRequest:
        """Parse the request body, and return the request to forward to a node."""
        if is_large(body):
            return await read_large_request(workers, path, headers, body)
        return parse_request(path, headers, body)


class Responses(Generation):
    """Endpoint of `POST /v1/responses`, whose streams have their own error events."""

    def response(self, send: Send, request_id: str) -> Reply:
        """Return the `Reply` with error events of the Responses API."""
        return ResponseReply(send)


class Messages(Generation):
    """Endpoint of `POST /v1/messages`, which is translated to a chat request and back."""

    def response(self, send: Send, request_id: str) -> Reply:
        """Return the `Reply` that translates the node's answer to the Messages API."""
        return AnthropicReply(send, request_id)

    async def parse(
        self, workers: BodyWorkers, path: str, headers: Headers, body: bytes, response: Reply
    ) -> ClientRequest:
        """Translate the request body, and return the chat request to forward to a node."""
        assert isinstance(response, AnthropicReply)
        response.translation, request = await read_message(workers, headers, body)
        return request


async def stored_response(request: Request) -> Response:
    """Return or delete a stored response. The node checks that the key may access it."""
    for name in request.query_params:
        raise unsupported_parameter(name)
    return await _forward(request)


async def input_items(request: Request) -> Response:
    """Return the input items of a stored response."""
    return await _forward(request, f"/input_items?{urlencode(request.query_params.multi_items())}")


async def _forward(request: Request, subpath: str = "") -> Response:
    gateway: Gateway = request.app.state.gateway
    principal = request.state.principal
    identity = {} if principal is None else principal.headers()
    id: str = request.path_params["response_id"]
    holder = gateway.fleet.view().holder(id)
    if holder is not None:
        try:
            bearer = gateway.fleet.bearer(holder.name)
            status, body = await gateway.client.response(request.method, holder.endpoint, id, identity, bearer, subpath)
        except NodeError:
            message = f"node '{holder.name}' did not respond; try again"
            raise ApiError(502, "upstream_connection_error", message, type="api_error") from None
        if status != 404:
            return Response(body, status, media_type="application/json")
    message = f"response {id[:256]!r} not found; it may have expired; send the whole conversation instead"
    raise ApiError(404, "response_not_found", message, param="response_id")
