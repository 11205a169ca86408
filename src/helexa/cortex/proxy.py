"""Forwards one request to a node and its answer back, byte for byte."""

import logging
import time
from collections.abc import Iterable
from io import BytesIO

import aiohttp

from helexa.core.catalogue import Catalogue
from helexa.core.errors import ApiError
from helexa.cortex.decision import decide
from helexa.cortex.exchange import Exchange
from helexa.cortex.fleet import Fleet
from helexa.cortex.loader import Loader
from helexa.cortex.meter import Meter
from helexa.cortex.node_client import endpoint_url
from helexa.cortex.placement import Cold
from helexa.cortex.question import Question
from helexa.cortex.reply import Reply
from helexa.cortex.router import Warm, warm

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_SECS = 2.0
IDLE_TIMEOUT_SECS = 300.0

_WRITTEN_AT_ONCE_BYTES = 1 << 20
_HOP_BY_HOP = {
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
_CREDENTIALS = {"authorization", "x-api-key", "cookie"}
# `accept-encoding` is dropped so that nodes answer in plain bytes, which the meter can read.
_NOT_FORWARDED = _HOP_BY_HOP | _CREDENTIALS | {"host", "content-length", "expect", "accept-encoding"}
_IDENTITY_PREFIX = "x-helexa-"
_NOT_RETURNED = _HOP_BY_HOP | {"date", "server"}


class _NoAnswer(Exception):
    """The node failed before the first byte of its answer: another may still be asked."""


class Proxy:
    """Answers questions by asking nodes."""

    def __init__(self, session: aiohttp.ClientSession, fleet: Fleet, catalogue: Catalogue, loader: Loader) -> None:
        self._session = session
        self._fleet = fleet
        self._catalogue = catalogue
        self._loader = loader
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_TIMEOUT_SECS, sock_read=IDLE_TIMEOUT_SECS
        )

    async def answer(self, question: Question, reply: Reply, exchange: Exchange) -> None:
        """Route the question, load its model if need be, and pass the answer on.

        Raises:
            ApiError: refused or failed; the caller ends the reply with it.
        """
        target = await self._route(question, exchange)
        try:
            await self._ask(target, question, reply, exchange)
        except _NoAnswer as error:
            log.warning("%s gave no answer for %s: %s", target.node, target.model, error)
            other = warm(self._fleet.view(), target.model, avoid={target.node})
            if other is None:
                raise _unreachable(target.node) from error
            try:
                await self._ask(other, question, reply, exchange)
            except _NoAnswer as second:
                log.warning("%s gave no answer for %s: %s", other.node, other.model, second)
                raise _unreachable(other.node) from second

    async def _route(self, question: Question, exchange: Exchange) -> Warm:
        view = self._fleet.view()
        model = self._catalogue.resolve(question.model)
        if self._catalogue.profile(model) is not None or view.knows(model):
            exchange.model = model
        decision = decide(view, self._catalogue, question.model)
        exchange.node = decision.node
        return await self._loader.load(decision) if isinstance(decision, Cold) else decision

    async def _ask(self, target: Warm, question: Question, reply: Reply, exchange: Exchange) -> None:
        exchange.node, exchange.waited = target.node, time.perf_counter() - exchange.started
        with self._fleet.request(target.node, target.model):
            try:
                response = await self._session.post(
                    endpoint_url(target.url, question.path),
                    data=_payload(question.body_for(target.model)),
                    headers=forwarded_headers(question.headers),
                    timeout=self._timeout,
                    allow_redirects=False,
                )
            except aiohttp.SocketTimeoutError as error:
                raise _unreachable(target.node) from error  # it has the request: asking another would run it twice
            except (aiohttp.ClientError, OSError) as error:
                raise _NoAnswer(type(error).__name__) from error
            try:
                await self._relay(response, reply, exchange)
            finally:
                response.close()

    async def _relay(self, response: aiohttp.ClientResponse, reply: Reply, exchange: Exchange) -> None:
        content = response.content
        try:
            chunk = await content.readany()
        except aiohttp.SocketTimeoutError as error:
            raise _unreachable(exchange.node) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _NoAnswer(type(error).__name__) from error
        streamed = response.content_type == "text/event-stream"
        exchange.meter = meter = Meter(streamed=streamed)
        exchange.status = response.status
        exchange.failed = response.status >= 400
        await reply.start(response.status, returned_headers(response.raw_headers), streamed=streamed)
        while chunk:
            meter.feed(chunk, time.perf_counter())
            await reply.write(chunk)
            try:
                chunk = await content.readany()
            except (aiohttp.ClientError, OSError) as error:
                log.warning("%s broke off an answer of %s: %s", exchange.node, exchange.model, type(error).__name__)
                raise ApiError(
                    502, "upstream_connection_error", "the node broke off its answer", type="api_error"
                ) from error
        await reply.finish()


def forwarded_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """A client's headers as a node may see them: no credentials, no claims of identity, nothing of the connection."""
    pairs = [(name.decode("ascii", "replace").lower(), value.decode("utf-8", "replace")) for name, value in headers]
    dropped = _NOT_FORWARDED | _named_by_connection(pairs)
    return [pair for pair in pairs if pair[0] not in dropped and not pair[0].startswith(_IDENTITY_PREFIX)]


def returned_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A node's headers as the client may see them: all but those of the connection."""
    pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    dropped = _NOT_RETURNED | _named_by_connection(pairs)
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs if name not in dropped]


def _payload(body: bytes) -> bytes | BytesIO:
    """A large body is written in pieces, so that it does not hold up the event loop."""
    return body if len(body) <= _WRITTEN_AT_ONCE_BYTES else BytesIO(body)


def _named_by_connection(headers: Iterable[tuple[str, str]]) -> set[str]:
    values = [value for name, value in headers if name == "connection"]
    return {token.strip().lower() for value in values for token in value.split(",")}


def _unreachable(node: str) -> ApiError:
    return ApiError(502, "upstream_connection_error", f"node '{node}' did not answer", type="api_error")
