"""The generation endpoints. Each request is authenticated, limited, routed, forwarded, charged and recorded."""

import asyncio
import logging
import time

from starlette.types import Receive, Scope, Send

from helexa.core import logs, tracing
from helexa.core.errors import ApiError, internal_error, shutting_down
from helexa.cortex.anthropic.reply import AnthropicReply
from helexa.cortex.gateway import Gateway
from helexa.cortex.observability.request_record import RequestRecord
from helexa.cortex.replies.reply import Reply
from helexa.cortex.replies.response_reply import ResponseReply
from helexa.cortex.requests.body_jobs import read_message, read_request
from helexa.cortex.requests.body_workers import BodyWorkers
from helexa.cortex.requests.request import ClientRequest, read_body
from helexa.cortex.serving.service import serve
from helexa.http.connections.client_disconnect import ClientDisconnected, DisconnectGuard
from helexa.http.connections.request_head import Headers, request_id, require_json

log = logging.getLogger(__name__)
requests = logging.getLogger("helexa.cortex.requests")


class Generation:
    """ASGI endpoint of the generation routes with OpenAI's formats, which nodes accept without translation."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. On every code path, the request's record is written to metrics and logs exactly once."""
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
            require_json(headers)
            with gateway.rate_limiter.enter(record.principal) as permit:
                body = await read_body(receive, headers, gateway.max_body_bytes)
                record.read = time.perf_counter()
                with scope["extensions"][DisconnectGuard.NAME]:
                    request = await self.parse(gateway.body_workers, record.api, headers, body, response)
                    await serve(gateway, request, response, record, permit)
        except ClientDisconnected:
            record.client_gone = True
        except ApiError as error:
            failure = error
        except asyncio.CancelledError:  # only the server cancels this task, when its grace period for open streams ends
            failure = shutting_down()
        except Exception:
            log.exception("internal error")
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

    def response(self, send: Send, request_id: str) -> Reply:
        """Return the `Reply` that sends the response to the client. Subclasses return one for their API's format."""
        return Reply(send)

    async def parse(
        self, workers: BodyWorkers, path: str, headers: Headers, body: bytes, response: Reply
    ) -> ClientRequest:
        """Parse the request body, and return the request to forward to a node."""
        return await read_request(workers, path, headers, body)


class Responses(Generation):
    """Endpoint of `POST /v1/responses`. Streams of the Responses API have a special format for error events."""

    def response(self, send: Send, request_id: str) -> Reply:
        """Return the `Reply` that sends the response, with error events in the format of the Responses API."""
        return ResponseReply(send)


class Messages(Generation):
    """Endpoint of `POST /v1/messages`. Nodes receive a chat request, and their chat completion is translated back."""

    def response(self, send: Send, request_id: str) -> Reply:
        """Return the `Reply` that translates the node's chat completion to the Messages API and sends it."""
        return AnthropicReply(send, request_id)

    async def parse(
        self, workers: BodyWorkers, path: str, headers: Headers, body: bytes, response: Reply
    ) -> ClientRequest:
        """Translate the request body, and return the chat request to forward to a node."""
        assert isinstance(response, AnthropicReply)
        response.translation, request = await read_message(workers, headers, body)
        return request
