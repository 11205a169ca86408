"""Generation requests to third-party backends, in the form that a backend accepts."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from helexa.core.wire.responses_request import ResponsesRequest
from helexa.cortex.backends.answer import BackendAnswer, NativeResponses, NodeResponse
from helexa.cortex.backends.chat_request import (
    EFFORT,
    OPTIONAL_FIELDS,
    OUTPUT_LIMIT,
    STREAM_OPTIONS,
    chat_body,
    for_backend,
    offers_other_tools,
    output_limit,
    read_responses_request,
    refused_fields,
    refuses_ids,
    refuses_order,
    refuses_thinking,
    refuses_tool_types,
    with_alternating_roles,
    with_output_limit,
    with_short_ids,
    without_field,
)
from helexa.cortex.backends.responses_answer import ResponsesAnswer
from helexa.cortex.forwarding.body_checks import BodyWorkers
from helexa.cortex.forwarding.request import ClientRequest
from helexa.cortex.forwarding.token_bounds import CHAT, COMPLETIONS, RESPONSES
from helexa.cortex.upstream.connection import UpstreamResponse
from helexa.cortex.upstream.response_body import CONTEXT_LENGTH_EXCEEDED, permitted_output, read_error

# The gateway forgets after this time what it has learned about a backend, because the backend may be updated.
KNOWLEDGE_SECS = 3600.0

MAX_ATTEMPTS = 8  # some backends name one refused field at a time

_REFUSALS = (400, 422)
_TEMPLATE_ERRORS = (400, 422, 500)  # servers answer an error of a chat template with any of these
_NO_ROUTE = (404, 405, 501)


@dataclass(frozen=True)
class Knowledge:
    """Facts that the gateway learned from refusals of one backend, for one model."""

    refused: frozenset[str] = frozenset()  # optional fields that the backend refuses
    lacks_responses: bool = False  # True if the backend has no `/v1/responses`
    # True if its `/v1/responses` refuses tools that are not functions. Such a request becomes a chat request, in which
    # the functions of namespaces are plain functions.
    functions_only: bool = False
    alternates: bool = False  # True if the roles of messages must alternate (`role_order`)
    short_ids: bool = False  # True if ids of tool calls must have Mistral's format (`short_call_ids`)


_NOTHING = Knowledge()


@dataclass(frozen=True)
class BackendAttempt:
    """One attempt to send a request to a third-party backend."""

    path: str  # API path at the backend
    body: bytes  # body of the request
    knowledge: Knowledge  # the knowledge about the backend with which the body was made
    optional: frozenset[str]  # names of fields that the gateway added, and may leave out
    # the client's request, if a chat completion answers a request of the Responses API; else None
    responses: ResponsesRequest | None = None

    @property
    def is_converted(self) -> bool:
        """Whether the gateway converts the response."""
        return self.path in (CHAT, COMPLETIONS, RESPONSES)

    def learn(self, status: int, error: bytes) -> Knowledge | None:
        """Return the knowledge for another attempt, or None if another would fail, too.

        `error` is the body of the backend's error response.
        """
        if status in _NO_ROUTE and self.path == RESPONSES:
            return replace(self.knowledge, lacks_responses=True)
        if (
            status in _REFUSALS
            and self.path == RESPONSES
            and refuses_tool_types(error)
            and offers_other_tools(self.body)
        ):
            return replace(self.knowledge, functions_only=True)
        if status in _TEMPLATE_ERRORS and self.path == CHAT:
            if not self.knowledge.alternates and refuses_order(error):
                return replace(self.knowledge, alternates=True)
            if not self.knowledge.short_ids and refuses_ids(error):
                return replace(self.knowledge, short_ids=True)
            if EFFORT in self.optional - self.knowledge.refused and refuses_thinking(error):
                return replace(self.knowledge, refused=self.knowledge.refused | {EFFORT})
        if status not in _REFUSALS or read_error(status, error).code == CONTEXT_LENGTH_EXCEEDED:
            return None  # such an error may name fields because of their values
        named = refused_fields(self.body, error)
        new = (named & self.optional) - self.knowledge.refused
        if not new:
            return None
        return replace(self.knowledge, refused=self.knowledge.refused | new)

    def shortened(self, body: bytes, status: int, error: bytes) -> bytes | None:
        """Return the request `body` with an output limit that fits the context, or None.

        The result is None unless the error states a smaller limit, and the gateway translated the body.
        """
        # Anthropic's clients must state a limit, and coding agents state one that exceeds the context of many models.
        # Nodes of helexa lower such a limit themselves.
        if OUTPUT_LIMIT not in self.optional or self.responses is not None or status not in _REFUSALS:
            return None
        limit = output_limit(body)
        most = 0 if limit is None else permitted_output(read_error(status, error), limit)
        return with_output_limit(body, most) if most else None

    def convert(
        self,
        response: NodeResponse,
        first_chunk: bytes,
        *,
        model: str,
        input_tokens: int,
        streamed: bool,
        on_estimate: Callable[[], None],
    ) -> NodeResponse:
        """Return a successful response in the form of OpenAI's specification.

        The caller checks `is_converted` first.

        Args:
            input_tokens: estimated number of prompt tokens.
            streamed: True if the client requests a stream.
            on_estimate: called if the converted answer contains estimated token counts.
        """
        if self.path == RESPONSES:
            return NativeResponses(response, first_chunk, streamed=streamed)
        chat = self.path == CHAT
        answer = BackendAnswer(response, first_chunk, model=model, chat=chat, streamed=streamed, conversation=self.body)
        if self.responses is None:
            return answer
        return ResponsesAnswer(answer, self.responses, model=model, input_tokens=input_tokens, on_estimate=on_estimate)


def new_attempt(
    path: str,
    body: bytes,
    *,
    translated: bool,
    adds_stream_options: bool,
    knowledge: Knowledge,
    thinks_by_effort: bool = False,
) -> BackendAttempt:
    """Return the next attempt, according to the knowledge about the backend.

    Args:
        translated: True if the gateway translated the body from another API.
        adds_stream_options: True if the gateway added `stream_options` to a body that it did not translate.
        thinks_by_effort: True if the backend reads only `reasoning_effort`, and not `chat_template_kwargs`.

    Raises:
        ApiError: 400: the request cannot be translated to a chat request.
    """
    responses = None
    if path == RESPONSES and (knowledge.lacks_responses or (knowledge.functions_only and offers_other_tools(body))):
        responses = read_responses_request(body)
        path, body, translated = CHAT, chat_body(responses), True
    optional = frozenset[str]()
    if translated:
        body = for_backend(body, knowledge.refused, thinks_by_effort=thinks_by_effort)
        optional = frozenset(OPTIONAL_FIELDS)
    elif adds_stream_options:
        optional = frozenset({STREAM_OPTIONS})
        body = without_field(body, STREAM_OPTIONS) if STREAM_OPTIONS in knowledge.refused else body
    if knowledge.alternates and path == CHAT:
        body = with_alternating_roles(body)
    if knowledge.short_ids and path == CHAT:
        body = with_short_ids(body)
    return BackendAttempt(path, body, knowledge, optional, responses)


@dataclass
class BackendKnowledge:
    """The knowledge about all third-party backends, by base URL and model.

    The models of one backend may have different chat templates, or be on different servers behind the backend.
    """

    _entries: dict[tuple[str, str], tuple[Knowledge, float]] = field(
        default_factory=dict[tuple[str, str], tuple[Knowledge, float]]
    )

    def of(self, url: str, model: str) -> Knowledge:
        """Return what the gateway knows about a model of the backend at `url`."""
        knowledge, until = self._entries.get((url, model), (_NOTHING, 0.0))
        if knowledge is not _NOTHING and time.monotonic() >= until:
            del self._entries[url, model]
            return _NOTHING
        return knowledge

    def add(self, url: str, model: str, lesson: Knowledge) -> None:
        """Add what a request has learned to what other requests have learned meanwhile."""
        known = self.of(url, model)
        merged = Knowledge(
            known.refused | lesson.refused,
            known.lacks_responses or lesson.lacks_responses,
            known.functions_only or lesson.functions_only,
            known.alternates or lesson.alternates,
            known.short_ids or lesson.short_ids,
        )
        self._entries[url, model] = merged, time.monotonic() + KNOWLEDGE_SECS


MAX_ERROR_BYTES = 64 << 10

# Sends a body to an API path of the backend. Returns the response, and the first bytes of its body.
Send = Callable[[str, bytes], Awaitable[tuple[UpstreamResponse, bytes]]]


class BackendRequests:
    """Sends requests to third-party backends, and remembers what each backend lacks."""

    def __init__(self, body_workers: BodyWorkers) -> None:
        self._body_workers = body_workers
        self._knowledge = BackendKnowledge()

    async def send(
        self, url: str, model: str, request: ClientRequest, body: bytes, send: Send, *, thinks_by_effort: bool = False
    ) -> tuple[UpstreamResponse, bytes, BackendAttempt]:
        """Send a request for the model `model` to the backend with the base URL `url`.

        A backend that refuses the request for a reason that the gateway can avoid gets the request again, at most
        `MAX_ATTEMPTS` times. A refused request has not generated anything.

        Args:
            model: id of the model at the backend.
            body: body of the request for a third-party backend.
            send: function that sends a body to the backend.
            thinks_by_effort: as for `new_attempt`.

        Returns:
            The last response, its first bytes (of an error response: all bytes up to `MAX_ERROR_BYTES`), and the form
            in which the request was sent.

        Raises:
            ApiError: 400: the request cannot be translated to the API of the backend.
            UpstreamError: the connection to the backend failed.
        """
        known = knowledge = self._knowledge.of(url, model)
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            attempt = await self._body_workers.run_if(
                request.large,
                new_attempt,
                request.path,
                body,
                translated=request.translated,
                adds_stream_options=request.adds_stream_options,
                knowledge=knowledge,
                thinks_by_effort=thinks_by_effort,
            )
            response, chunk = await send(attempt.path, attempt.body)
            if response.status < 400:
                if knowledge is not known:
                    self._knowledge.add(url, model, knowledge)
                return response, chunk, attempt
            chunk = await _read_error(response, chunk)
            lesson = attempt.learn(response.status, chunk) if attempts_left else None
            shorter = attempt.shortened(body, response.status, chunk) if attempts_left and lesson is None else None
            if lesson is None and shorter is None:
                return response, chunk, attempt
            response.close()
            knowledge, body = lesson or knowledge, shorter or body
        raise AssertionError("the last attempt returns its response")


async def _read_error(response: UpstreamResponse, chunk: bytes) -> bytes:
    body = bytearray(chunk)
    try:
        while len(body) <= MAX_ERROR_BYTES and (chunk := await response.chunk()):
            body += chunk
    except BaseException:
        response.close()
        raise
    return bytes(body)
