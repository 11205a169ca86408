"""Forwards a node's response to the client, and charges the request at its end.

Comments keep a stream alive before the response begins: while a model loads, and while a backend is silent.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable

import orjson

from helexa.core.errors import MODEL_SLEEPING, ApiError, overloaded, service_unavailable
from helexa.core.logs import quoted
from helexa.core.sse import first_event_end, last_event_end
from helexa.cortex.backends.answer import NodeResponse
from helexa.cortex.fleet.breaker import COOLDOWN_SECS
from helexa.cortex.fleet.fleet import Fleet
from helexa.cortex.forwarding.backend_requests_and_refusals import MAX_ERROR_BYTES
from helexa.cortex.forwarding.client_reply_and_error_events import Reply
from helexa.cortex.forwarding.headers import UNBUFFERED, returned_headers
from helexa.cortex.forwarding.request import ClientRequest
from helexa.cortex.forwarding.retry import (
    BUSY_STATUSES,
    NoResponse,
    count_failure,
    error_outcome,
    reason,
    retry_after,
    timed_out,
)
from helexa.cortex.forwarding.token_bounds import RESPONSES
from helexa.cortex.lifecycle.load_job import Progress
from helexa.cortex.request_record import RequestRecord
from helexa.cortex.routing import WarmRoute
from helexa.cortex.upstream.connection_and_timeouts import ReadTimeoutError, UpstreamError
from helexa.cortex.upstream.error_responses import for_client, has_openai_format, read_error, says_model_is_gone
from helexa.cortex.upstream.usage_meter import Meter, ResponseMeter
from helexa.http.headers import Headers

log = logging.getLogger(__name__)

MAX_BUFFERED_BYTES = 64 << 10
RETRY_BUSY = 2
RETRY_GONE = 2

_USAGE = b'"usage"'
_USAGE_OBJECT = re.compile(rb'"usage"\s*:\s*\{')
_DONE_EVENT = re.compile(rb"data: ?\[")

Settle = Callable[[], Awaitable[None]]  # charges a request to the key of its client

KEEP_ALIVE_AFTER_SECS = 3.0
KEEP_ALIVE_SECS = 1.0
SILENCE_SECS = 10.0

_EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    UNBUFFERED,
]


async def relay(
    fleet: Fleet,
    node_response: NodeResponse,
    chunk: bytes,
    target: WarmRoute,
    request: ClientRequest,
    response: Reply,
    record: RequestRecord,
    settle: Settle | None,
) -> None:
    """Forward a successful response to the client; before its end, charge the request.

    Args:
        chunk: the first bytes of the body of `node_response`.
        settle: function that charges the request to the client's key, or None for anonymous requests. It is not called
            for a stream without a final event, such as `[DONE]`; the caller must then charge the request.

    Raises:
        ApiError: the node's response is incomplete, a timeout expired, or the request cannot be charged.
    """
    headers = returned_headers(node_response.headers)
    headers.append((b"x-helexa-route", target.reason.encode()))
    streamed = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
    if streamed:
        headers.append(UNBUFFERED)
    record.meter = meter = (ResponseMeter if record.api == RESPONSES else Meter)(streamed=streamed)
    meter.feed(chunk, time.perf_counter())
    # A response that is not a stream is held back by one chunk, so that it is charged before its last bytes are sent.
    next_chunk = None if streamed else await _next_or_settle(fleet, node_response, record, settle)
    hides_usage = streamed and request.streams_chunks and not request.includes_usage
    usage_filter = UsageFilter() if hides_usage else None
    if not response.started:
        record.status = node_response.status
        await response.start(node_response.status, headers, streamed=streamed)
    else:
        # Keep-alive comments have already begun the response, with status 200.
        record.status = 200
    # The loop leaves the last chunk of a response that is not a stream to `finish` below.
    while chunk and next_chunk != b"":
        # The request is charged before the client sees the end of the stream. The client's next request then finds the
        # budget up to date.
        if streamed and settle is not None and meter.ended(len(chunk)):
            await settle()
        if streamed and node_response.complete:
            break  # `finish` sends the last chunk together with the end, because clients disconnect after `[DONE]`
        await response.write(chunk if usage_filter is None else usage_filter.feed(chunk))
        chunk = await read_chunk(fleet, node_response, record) if next_chunk is None else next_chunk
        if chunk:
            meter.feed(chunk, time.perf_counter())
            if not streamed:
                next_chunk = await _next_or_settle(fleet, node_response, record, settle)
    await response.finish(chunk if usage_filter is None else usage_filter.feed(chunk) + usage_filter.flush())
    if streamed and chunk:
        # Reads the end of the response, so that the connection can be reused.
        await read_chunk(fleet, node_response, record)


async def _next_or_settle(
    fleet: Fleet, node_response: NodeResponse, record: RequestRecord, settle: Settle | None
) -> bytes:
    """Return the next chunk of a non-stream response; at its end, charge the request."""
    chunk = b"" if node_response.complete else await read_chunk(fleet, node_response, record)
    if not chunk and settle is not None:
        await settle()
    return chunk


async def read_chunk(fleet: Fleet, node_response: NodeResponse, record: RequestRecord) -> bytes:
    """Return the next bytes to relay from a node's response, empty at its end.

    Raises:
        ApiError: 504 if a timeout expired, 502 if the connection ended.
    """
    try:
        return await node_response.chunk()
    except UpstreamError as error:
        is_silent = isinstance(error, ReadTimeoutError)
        count_failure(fleet, record, silent=is_silent)
        log.warning(
            "response incomplete node=%s model=%s error=%s; the request fails",
            record.node,
            quoted(record.model),
            quoted(reason(error)),
        )
        if is_silent:
            raise timed_out(record.node) from error
        raise ApiError(
            502,
            "upstream_connection_error",
            f"the response of node '{record.node}' ended before it was complete; try again",
            type="api_error",
        ) from error


async def forward_error(
    fleet: Fleet, node_response: NodeResponse, chunk: bytes, response: Reply, record: RequestRecord, *, last: bool
) -> None:
    """Forward a node's error response, or raise `NoResponse` for a retry.

    `NoResponse` is raised if the node does not have the model or the model sleeps. Unless `last` is true, it is also
    raised if the error is not about the request's content, or the node has rejected several requests in a row. All
    other errors are forwarded, or raised as `ApiError` if the client's response has begun, or the error is not in
    OpenAI's format or is about the gateway's own account. The message is not logged, because it may quote the prompt.
    """
    body = bytearray()
    # An endless error body must not fill the memory.
    while chunk and len(body) <= MAX_ERROR_BYTES:
        body += chunk
        chunk = await read_chunk(fleet, node_response, record)
    status = node_response.status
    node_error = read_error(status, bytes(body), retry_after(node_response))
    if says_model_is_gone(node_error):
        fleet.lost(record.node, record.model)
        message = f"node '{record.node}' does not have model '{record.model}' loaded any more; try again"
        raise NoResponse("the node has unloaded the model", "gone", service_unavailable(message, RETRY_GONE))
    if node_error.code == MODEL_SLEEPING:
        # The outcome `gone` makes the gateway load the model again. It may unload other models, so that this model has
        # the memory to wake.
        fleet.fell_asleep(record.node, record.model)
        raise NoResponse("the model sleeps on the node", "gone", for_client(node_error, record.node))
    error, outcome = for_client(node_error, record.node), error_outcome(status, node_error)
    if outcome is None and fleet.rejected(record.node, record.model, record.requester):
        outcome = "declined"  # the node is suspect: it has rejected several requests in a row
    # `fleet.busy` makes the router prefer other nodes for a while, for the requests of all clients. After a failure
    # with no other node left to try (`last`), the request itself may be the cause, so the node is not marked as busy.
    if status in BUSY_STATUSES or (outcome == "failed" and not last):
        fleet.busy(record.node, record.model, node_error.retry_after or COOLDOWN_SECS)
    if outcome is not None and not last:
        if outcome == "busy":
            error = overloaded(f"every node that has model '{record.model}' is busy; try again", RETRY_BUSY)
        raise NoResponse(f"the node answered HTTP {status} code={node_error.code}", outcome, error)
    record.failed = True
    record.status = record.status or error.status
    record.code = error.code
    log.info("node rejected the request node=%s status=%d code=%s", record.node, status, node_error.code)
    if response.started or error is not node_error or not has_openai_format(bytes(body), error):
        raise error
    # The body may have been cut off, so the `content-length` of the node's response does not apply.
    headers = [header for header in returned_headers(node_response.headers) if header[0] != b"content-length"]
    await response.start(status, [*headers, (b"content-length", b"%d" % len(body))], streamed=False)
    await response.finish(bytes(body))


class UsageFilter:
    """Removes events with `usage` and no `choices` from a stream.

    An incomplete event is buffered until it is complete or longer than `MAX_BUFFERED_BYTES`.
    """

    # The gateway requests usage from every node. A client that did not request usage may read `choices[0]` of every
    # event, as OpenAI's own examples do, and would fail at a usage event.
    def __init__(self) -> None:
        self._buffer = b""
        self._event_begun = False  # True if the beginning of the current event was already forwarded

    def feed(self, chunk: bytes) -> bytes:
        """Process the next bytes, and return the bytes to forward to the client now."""
        # Usually, a chunk consists of whole events without token counts. Then it is forwarded without a copy.
        if not self._buffer and chunk.find(_USAGE) < 0 and chunk.endswith(b"\n\n"):
            self._event_begun = False
            return chunk
        data = self._buffer + chunk
        end = last_event_end(data, 0, len(data))
        events, partial_event = data[:end], data[end:]
        if _USAGE in events:
            events = self._without_usage(events)
        if end:
            self._event_begun = False
        # Clients disconnect after `[DONE]`, so an event that may be `[DONE]` is never held back.
        if self._event_begun or len(partial_event) > MAX_BUFFERED_BYTES or _DONE_EVENT.match(partial_event):
            self._buffer, self._event_begun = b"", bool(partial_event)
            return events + partial_event
        self._buffer = partial_event
        return events

    def flush(self) -> bytes:
        """Return the bytes that are buffered when the stream ends."""
        buffered, self._buffer = self._buffer, b""
        return buffered

    def _without_usage(self, events: bytes) -> bytes:
        passed_on: list[bytes] = []
        pass_from, usage_at = 0, events.find(_USAGE)
        while usage_at >= 0:
            start = max(pass_from, last_event_end(events, pass_from, usage_at))
            end = first_event_end(events, usage_at) or len(events)
            # An event is not removed if its beginning was already sent to the client.
            if not (start == 0 and self._event_begun) and _is_usage(events[start:end]):
                passed_on.append(events[pass_from:start])
                pass_from = end
            usage_at = events.find(_USAGE, end)
        return b"".join([*passed_on, events[pass_from:]])


def _is_usage(event: bytes) -> bool:
    if _USAGE_OBJECT.search(event) is None:
        return False
    try:
        chunk = orjson.loads(event.partition(b"data:")[2])
    except orjson.JSONDecodeError:
        return False
    return isinstance(chunk, dict) and not chunk.get("choices") and isinstance(chunk.get("usage"), dict)


async def wait_for_load(
    work: Awaitable[WarmRoute], progress: Callable[[], Progress | None], stream: bool, response: Reply
) -> WarmRoute:
    """Relay the progress of a model's load to the client; then return the chosen node.

    If `stream`, the client receives SSE comments with the load progress: the first one after `KEEP_ALIVE_AFTER_SECS`,
    the others every `KEEP_ALIVE_SECS`. The first one begins the response, with status 200. Errors of `work` are raised.

    Args:
        work: awaitable that loads the model and returns the node.
        progress: function that returns the current load progress, or None if it is unknown.
    """
    task = asyncio.ensure_future(work)
    try:
        timeout_secs = KEEP_ALIVE_AFTER_SECS if stream else None
        while not (await asyncio.wait((task,), timeout=timeout_secs))[0]:
            if not response.started:
                await response.start(200, _EVENT_STREAM, streamed=True)
            await response.write(b": %s\n\n" % _progress_text(progress()))
            timeout_secs = KEEP_ALIVE_SECS
        return task.result()
    finally:
        # This ends only the wait of this request. The load itself continues.
        task.cancel()


class SilenceComments:
    """Keeps a stream to a client alive while a third-party backend sends nothing.

    The client gets a comment after `SILENCE_SECS` to `2 * SILENCE_SECS` without bytes. If the response to the client
    has not begun, it begins as a stream with status 200. A later error of the backend is then an event in the stream.
    Streams of helexa's nodes need no comments of the gateway, because these nodes send comments themselves.
    """

    def __init__(self, response: Reply) -> None:
        self._response = response
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._task = asyncio.create_task(self._run())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        response, writes = self._response, self._response.writes
        while True:
            await asyncio.sleep(SILENCE_SECS)
            if response.writes == writes and not response.finished:
                if not response.started:
                    await response.start(200, _EVENT_STREAM, streamed=True)
                await response.keep_alive()
            writes = response.writes


def _progress_text(progress: Progress | None) -> bytes:
    if progress is None:
        return b"loading"
    text = "loading" if progress.fraction is None else f"loading, {progress.fraction:.0%}"
    return (text if progress.eta_secs is None else f"{text}, about {progress.eta_secs:.0f} s left").encode()
