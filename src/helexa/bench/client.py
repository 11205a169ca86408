"""The benchmark client: sends a request and records when each chunk arrives.

OpenAI's reasoning models reject `max_tokens`, `temperature` and `top_p`. Some of Anthropic's models reject
`temperature`, or `temperature` together with `top_p`. There is no built-in list of models, because it would soon be
outdated.

A failed request is not retried, with one exception. If the server rejects an optional parameter by name, the request is
sent again without this parameter or with a replacement.
"""

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson

from helexa.bench.prompts_and_load_generators import Clock, PromptRequest
from helexa.bench.request_records_and_metrics import Delta, RequestRecord, Role
from helexa.bench.wire_formats import ApiFormat, StreamError, Substitutes, mapping, text
from helexa.core.errors import HelexaError
from helexa.core.logs import tell
from helexa.core.sse import EventParser

_CALL_SECS = 10.0
_TEMPORARY = (408, 425, 429)  # client errors after which the same request may succeed later
_MAX_BYTES = 64 << 20  # maximum size of a JSON response; enough for an image of 4096 by 4096 pixels
_MAX_REASON_CHARS = 300

_STATUSES = (400, 422)
_REJECTION = re.compile(
    r"unsupported|not supported|not support|deprecated|cannot both|unknown|unrecognized|unexpected|not permitted"
    r"|not allowed|forbidden",
    re.IGNORECASE,
)


class TargetError(HelexaError):
    """A target is unreachable, returns an error, or returns an invalid response."""


class NoJsonRouteError(TargetError):
    """A target does not offer a route, or does not answer the route with JSON."""


@dataclass(frozen=True, slots=True)
class RejectedParameters:
    """The parameters that each model has rejected. Later requests do not send them.

    All clients of the server share this object.
    """

    names: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def replace(self, body: dict[str, Any], substitutes: Substitutes) -> dict[str, Any]:
        """Return `body` without the parameters that its model has rejected.

        If `substitutes` has a replacement for a rejected parameter, the replacement gets the value of the parameter.
        """
        names = self.names.get(body["model"], set())
        named = {substitutes[name] if name in names else name: value for name, value in body.items()}
        return {name: value for name, value in named.items() if name is not None}

    def learn(self, body: dict[str, Any], status: int, response: bytes, substitutes: Substitutes) -> str | None:
        """Remember and return the parameter that an error response rejects.

        Args:
            body: body of the rejected request.
            status: HTTP status of the response.
            response: body of the response.
            substitutes: optional parameters of the API format and their replacements.

        Returns:
            The rejected parameter, or None if the error has another cause.
        """
        name = _rejected(body, status, response, substitutes)
        if name is not None:
            self.names.setdefault(body["model"], set()).add(name)
        return name


def _rejected(body: dict[str, Any], status: int, response: bytes, substitutes: Substitutes) -> str | None:
    if status not in _STATUSES:
        return None
    try:
        error = mapping(mapping(orjson.loads(response)).get("error"))
    except ValueError:
        return None
    message = text(error.get("message"))
    if not _REJECTION.search(f"{text(error.get('code'))} {message}"):
        return None
    sent = [name for name in substitutes if name in body]
    if (parameter := text(error.get("param"))) in sent:
        return parameter
    return next((name for name in sent if re.search(rf"\b{name}\b", message)), None)


log = logging.getLogger(__name__)

REJECTION_STATUSES = (429, 503, 529)  # HTTP statuses of overloaded servers. Anthropic uses 529.

_MAX_CONNECTIONS = 4096
_MAX_ANSWER_BYTES = 256 << 20
_MAX_ERROR_BYTES = 64 << 10
_MAX_ERROR_CHARS = 500
_READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Client:
    """Sends streaming requests to one server."""

    session: aiohttp.ClientSession  # HTTP session from `open_session`, which records when a request is sent
    endpoint: str  # base URL of the server
    api_format: ApiFormat  # API format of the server
    clock: Clock  # source of the current time
    bearer: str | None = None  # API key, or None
    timeout_secs: float = 600.0  # longest duration of a request, in seconds
    ignore_eos: bool = False  # True if the server supports the parameter `ignore_eos`
    # optional parameters that each model has rejected, and that are not sent to the model again
    rejected: RejectedParameters = field(default_factory=RejectedParameters)

    async def ask(
        self,
        prompt: PromptRequest,
        *,
        scheduled: float | None = None,
        role: Role = "load",
        cancel_after: int | None = None,
    ) -> RequestRecord:
        """Send `prompt` as a request; return a record of its times, content and errors.

        An error of the request is stored in the record and not raised.

        Args:
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
        moments = SimpleNamespace(now=now, sent=requested_at)
        try:
            async with asyncio.timeout(self.timeout_secs):
                await self._send(prompt, record, moments, cancel_after)
        except TimeoutError:
            record.status, record.error = (
                "timeout",
                f"no end of the answer after {self.timeout_secs:g} s; raise bench.request_timeout_secs",
            )
        except StreamError as error:
            record.status, record.error = "incomplete", str(error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            begun = record.http_status is not None
            record.status = "incomplete" if begun else "error"
            record.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
        record.sent, record.ended = moments.sent, now()
        if scheduled is None:
            record.scheduled = record.sent
        return record

    async def _send(
        self,
        prompt: PromptRequest,
        record: RequestRecord,
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
                await self._read(response.content, record, cancel_after)
                if record.status == "cancelled":
                    response.close()  # close the connection, as a disconnecting client does
                return
            error = await response.content.read(_MAX_ERROR_BYTES)
        parameter = self.rejected.learn(body, response.status, error, substitutes)
        if parameter is not None:  # the recursion ends: each rejection removes one of a few optional parameters
            tell(log, logging.INFO, "parameter rejected", model=prompt.model, parameter=parameter)
            await self._send(prompt, record, moments, cancel_after)
            return
        record.http_status = response.status
        record.status = "rejected" if response.status in REJECTION_STATUSES else "error"
        record.error = _rejection_text(response.status, error)

    async def _read(self, content: aiohttp.StreamReader, record: RequestRecord, cancel_after: int | None) -> None:
        now, parser, size = self.clock.now, EventParser(), 0
        while not record.is_complete and (data := await content.read(_READ_BYTES)):
            at = now()
            size += len(data)
            if size > _MAX_ANSWER_BYTES:
                raise StreamError(
                    f"the model's answer has more than {_MAX_ANSWER_BYTES} bytes; lower the scenario's max_tokens"
                )
            for event in parser.feed(data):
                kind = self.api_format.take(event, record)
                if kind is not None:
                    record.deltas.append(Delta(at, kind, record.counted_tokens))
                if cancel_after is not None and len(record.deltas) >= cancel_after:
                    record.status = "cancelled"
                    return
        if not record.is_complete and record.finish_reason is None:
            raise StreamError("the server's stream ended before the answer was complete; see the server's log")


@asynccontextmanager
async def open_session(connector: aiohttp.BaseConnector | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """Provide an HTTP session that permits many connections and has no timeouts.

    For a request with `trace_request_ctx`, the session calls `now()` of this object just before the request is sent,
    and stores the time as its attribute `sent`.
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
    """Store the current time in the request's context.

    Called when a connection is ready, just before sending.
    """
    moments: SimpleNamespace | None = context.trace_request_ctx
    if moments is not None:
        moments.sent = moments.now()


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


class JsonCalls:
    """Sends JSON requests to a target with the target's API key."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: str, headers: dict[str, str]) -> None:
        self._session = session
        self.endpoint = endpoint
        self._headers = headers

    async def get(self, path: str) -> Any:
        """Send a GET request and return the parsed JSON response.

        Raises:
            TargetError: the target is unreachable, returns an error status, or does not return JSON.
        """
        return await self._call("GET", path, None, _CALL_SECS)

    async def get_or_none(self, path: str) -> Any:
        """Send a GET request; return the parsed JSON, or None if the route does not exist.

        Raises:
            TargetError: the target is unreachable, or returns an error status that may be temporary.
        """
        try:
            return await self.get(path)
        except NoJsonRouteError:
            return None

    async def post(self, path: str, body: object, timeout_secs: float) -> Any:
        """Send `body` as JSON in a POST request and return the parsed JSON response.

        Raises:
            TargetError: the target is unreachable, returns an error status, or does not return JSON.
        """
        return await self._call("POST", path, body, timeout_secs)

    async def _call(self, method: str, path: str, body: object, timeout_secs: float) -> Any:
        headers, data = self._headers, None
        if body is not None:
            headers, data = {**headers, "content-type": "application/json"}, orjson.dumps(body)
        try:
            async with (
                asyncio.timeout(timeout_secs),
                self._session.request(method, f"{self.endpoint}{path}", data=data, headers=headers) as response,
            ):
                text = await _bounded(response.content)
                status = response.status
        except TimeoutError:
            raise TargetError(
                f"{self.endpoint}{path}: no answer within {timeout_secs:g} s; see the server's log"
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            problem = f"{self.endpoint}{path}: {error}"[:_MAX_REASON_CHARS]
            raise TargetError(f"{problem}; check the server, and the endpoint of the target") from error
        if status // 100 != 2:
            reason = text[:_MAX_REASON_CHARS].decode("utf-8", "replace")
            kind = NoJsonRouteError if _is_permanent(status) else TargetError
            raise kind(f"{self.endpoint}{path} answered HTTP {status}, see the server's log: {reason}")
        try:
            return orjson.loads(text)
        except ValueError:
            raise NoJsonRouteError(
                f"{self.endpoint}{path}: the answer is not JSON; check the endpoint of the target"
            ) from None


def _is_permanent(status: int) -> bool:
    """Return whether a repeated request would get the same error `status`."""
    return status == 501 or (status < 500 and status not in _TEMPORARY)


async def _bounded(content: aiohttp.StreamReader) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES:
            raise ValueError(f"the server's response has more than {_MAX_BYTES} bytes")
    return b"".join(parts)
