"""The generation endpoints: authenticate, limit, route, forward, settle and record each request."""

import asyncio
import logging
import time

from starlette.types import Receive, Scope, Send

from helexa.core import logs
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
from helexa.http.connections.client_disconnect import ClientGone, HangUp
from helexa.http.connections.request_head import Headers, refuse_encoded, request_id

log = logging.getLogger(__name__)
requests = logging.getLogger("helexa.cortex.requests")


class Generation:
    """The ASGI endpoint of all generation routes in the nodes' own API formats."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Every code path records the request exactly once."""
        gateway: Gateway = scope["app"].state.gateway
        headers = scope["headers"]
        record = RequestRecord(request_id(headers), scope["path"])
        logs.request_id.set(record.request_id)
        reply = self.reply(send, record.request_id)
        reply.headers.append((b"x-request-id", record.request_id.encode()))
        failure: ApiError | None = None
        try:
            record.principal = gateway.gatekeeper.admit(headers)
            refuse_encoded(headers)
            with gateway.limits.enter(record.principal) as admission:
                body = await read_body(receive, headers, gateway.max_body_bytes)
                record.read = time.perf_counter()
                with scope["extensions"][HangUp.NAME]:
                    request = await self.question(gateway.body_workers, record.api, headers, body, reply)
                    await serve(gateway, request, reply, record, admission)
        except ClientGone:
            record.client_gone = True
        except ApiError as error:
            failure = error
        except asyncio.CancelledError:  # only the server cancels this task, when its grace period for open streams ends
            failure = shutting_down()
        except Exception:
            log.exception("a fault in the gateway")
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
        if failure is not None:
            await reply.abort(failure)

    def reply(self, send: Send, request_id: str) -> Reply:
        """Return the reply to the client."""
        return Reply(send)

    async def question(
        self, workers: BodyWorkers, path: str, headers: Headers, body: bytes, reply: Reply
    ) -> ClientRequest:
        """Return the request for a node."""
        return await read_request(workers, path, headers, body)


class Responses(Generation):
    """`POST /v1/responses`, which has its own error events."""

    def reply(self, send: Send, request_id: str) -> Reply:
        """Return a reply with the error events of the Responses API."""
        return ResponseReply(send)


class Messages(Generation):
    """`POST /v1/messages`: nodes get a chat request, and their chat completion is translated back."""

    def reply(self, send: Send, request_id: str) -> Reply:
        """Return a reply that translates chat completions."""
        return AnthropicReply(send, request_id)

    async def question(
        self, workers: BodyWorkers, path: str, headers: Headers, body: bytes, reply: Reply
    ) -> ClientRequest:
        """Return the request as a chat request."""
        assert isinstance(reply, AnthropicReply)
        reply.translation, request = await read_message(workers, headers, body)
        return request
