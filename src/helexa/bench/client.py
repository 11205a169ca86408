"""The benchmark client: sends a streaming request and records the arrival time of each chunk.

A failed request is not retried, with one exception. If the server rejects an optional parameter by name, the request is
sent again without this parameter or with a replacement.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson

from helexa.bench.api_formats.anthropic import AnthropicMessages
from helexa.bench.api_formats.api_format import Answer, ApiFormat, StreamError
from helexa.bench.api_formats.openai import OpenAIChat
from helexa.bench.api_formats.rejected_parameters import RejectedParameters
from helexa.bench.identity import TargetKind
from helexa.bench.measurement.clock import Clock
from helexa.bench.measurement.prompt_request import PromptRequest
from helexa.bench.measurement.request_record import Delta, RequestRecord, Role
from helexa.core.logs import tell
from helexa.core.sse import EventParser

log = logging.getLogger(__name__)

REJECTION_STATUSES = (429, 503, 529)
"""HTTP statuses with which overloaded servers reject requests. 529 is used by Anthropic."""

_MAX_CONNECTIONS = 4096
_MAX_ANSWER_BYTES = 256 << 20
_MAX_ERROR_BYTES = 64 << 10
_MAX_ERROR_CHARS = 500
_READ_BYTES = 1 << 18


def api_format_of(kind: TargetKind) -> ApiFormat:
    """Return the API format (OpenAI or Anthropic) that servers of `kind` accept."""
    return AnthropicMessages() if kind == "anthropic" else OpenAIChat()


@dataclass(frozen=True, slots=True)
class Client:
    """Sends streaming requests to one server.

    Attributes:
        session: HTTP session from `open_session`, which records when a request is sent.
        endpoint: base URL of the server.
        api_format: API format of the server.
        clock: source of the current time.
        bearer: API key, or None.
        timeout_secs: longest duration of a request, in seconds.
        ignore_eos: True if the server supports the parameter `ignore_eos`.
        rejected: optional parameters that each model has rejected, and that are not sent to the model again.
    """

    session: aiohttp.ClientSession
    endpoint: str
    api_format: ApiFormat
    clock: Clock
    bearer: str | None = None
    timeout_secs: float = 600.0
    ignore_eos: bool = False
    rejected: RejectedParameters = field(default_factory=RejectedParameters)

    async def ask(
        self,
        prompt: PromptRequest,
        *,
        scheduled: float | None = None,
        role: Role = "load",
        cancel_after: int | None = None,
    ) -> RequestRecord:
        """Send a request, read the response to its end, and return a record of times, content and errors.

        An error of the request is stored in the record and not raised.

        Args:
            prompt: the request.
            scheduled: time on `clock` at which the request should be sent, or None if it has no schedule.
            role: purpose of the request within the benchmark load, stored in the record.
            cancel_after: number of chunks after which the client closes the connection, or None to read the whole
                response.
        """
        now = self.clock.now
        requested_at = now()
        record = RequestRecord(
            scheduled=requested_at if scheduled is None else scheduled,
            sent=requested_at,
            ended=requested_at,
            status="ok",
            role=role,
        )
        answer = Answer()
        moments = SimpleNamespace(now=now, sent=requested_at)
        try:
            async with asyncio.timeout(self.timeout_secs):
                await self._send(prompt, record, answer, moments, cancel_after)
        except TimeoutError:
            record.status, record.error = "timeout", f"no end of the answer after {self.timeout_secs:g} s"
        except StreamError as error:
            record.status, record.error = "incomplete", str(error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            begun = record.http_status is not None
            record.status = "incomplete" if begun else "error"
            record.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
        record.sent, record.ended = moments.sent, now()
        if scheduled is None:
            record.scheduled = record.sent
        _conclude(record, answer)
        return record

    async def _send(
        self,
        prompt: PromptRequest,
        record: RequestRecord,
        answer: Answer,
        moments: SimpleNamespace,
        cancel_after: int | None,
    ) -> None:
        substitutes = self.api_format.substitutes
        body = self.api_format.body(prompt, ignore_eos=self.ignore_eos)
        body = self.rejected.replace(body, substitutes)
        headers = {"content-type": "application/json", **self.api_format.headers(self.bearer)}
        async with self.session.post(
            f"{self.endpoint}{self.api_format.path}",
            data=orjson.dumps(body),
            headers=headers,
            trace_request_ctx=moments,
        ) as response:
            if response.status == 200:
                record.http_status = response.status
                await self._read(response.content, record, answer, cancel_after)
                if record.status == "cancelled":
                    response.close()  # close the connection, as a disconnecting client does
                return
            error = await response.content.read(_MAX_ERROR_BYTES)
        parameter = self.rejected.learn(body, response.status, error, substitutes)
        if parameter is not None:
            tell(log, logging.INFO, "parameter_rejected", model=prompt.model, parameter=parameter)
            await self._send(prompt, record, answer, moments, cancel_after)
            return
        record.http_status = response.status
        record.status = "rejected" if response.status in REJECTION_STATUSES else "error"
        record.error = _rejection_text(response.status, error)

    async def _read(
        self, content: aiohttp.StreamReader, record: RequestRecord, answer: Answer, cancel_after: int | None
    ) -> None:
        now, parser, size = self.clock.now, EventParser(), 0
        while not answer.ended and (data := await content.read(_READ_BYTES)):
            at = now()
            size += len(data)
            if size > _MAX_ANSWER_BYTES:
                raise StreamError(f"the answer is over {_MAX_ANSWER_BYTES} bytes")
            for event in parser.feed(data):
                kind = self.api_format.take(event, answer)
                if kind is not None:
                    record.deltas.append(Delta(at, kind, answer.counted))
                if cancel_after is not None and len(record.deltas) >= cancel_after:
                    record.status = "cancelled"
                    return
        if not answer.ended and answer.finish_reason is None:
            raise StreamError("the stream ended before the answer did")


@asynccontextmanager
async def open_session(connector: aiohttp.BaseConnector | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """Provide an HTTP session with a large connection pool and without timeouts, cookies or proxy.

    Requests of the session record the time at which they are sent.
    """
    trace = aiohttp.TraceConfig()
    for signal in (trace.on_connection_create_end, trace.on_connection_reuseconn):
        signal.append(_note_sending)
    async with aiohttp.ClientSession(
        connector=connector or aiohttp.TCPConnector(limit=_MAX_CONNECTIONS),
        timeout=aiohttp.ClientTimeout(total=None),
        trace_configs=[trace],
        read_bufsize=_READ_BYTES,
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        yield session


async def _note_sending(session: aiohttp.ClientSession, context: SimpleNamespace, parameters: Any) -> None:
    """Store the current time in the request's context. Called when a connection is ready, just before sending."""
    moments: SimpleNamespace | None = context.trace_request_ctx
    if moments is not None:
        moments.sent = moments.now()


def _conclude(record: RequestRecord, answer: Answer) -> None:
    record.text, record.reasoning = "".join(answer.text), "".join(answer.reasoning)
    record.tool_calls = [answer.calls[index] for index in sorted(answer.calls)]
    record.finish_reason = answer.finish_reason
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"):
        setattr(record, name, getattr(answer, name))
    record.prefill_s, record.decode_s, record.queue_s = answer.prefill_s, answer.decode_s, answer.queue_s


def _rejection_text(status: int, body: bytes) -> str:
    try:
        error = orjson.loads(body)
    except ValueError:
        error = None
    error = error.get("error") if isinstance(error, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    text = message if isinstance(message, str) else body.decode("utf-8", "replace")
    printable = "".join(itertools.islice((c if c.isprintable() else " " for c in text), _MAX_ERROR_CHARS))
    return f"HTTP {status}: {printable.strip()}"
