"""Generation requests to third-party backends, in the form that a backend accepts."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from helexa.core.wire.responses_request import ResponsesRequest
from helexa.cortex.backends.answer import BackendAnswer, NativeResponses, NodeResponse
from helexa.cortex.backends.chat_request import (
    EFFORT,
    OPTIONAL_FIELDS,
    OUTPUT_LIMIT,
    STREAM_OPTIONS,
    for_backend,
    without_billing_lines,
)
from helexa.cortex.backends.completion_choice import UNCHANGED, Changes
from helexa.cortex.backends.learned_refusals import BackendKnowledge, Knowledge
from helexa.cortex.backends.refused_fields import (
    output_limit,
    refused_fields,
    refuses_effort,
    refuses_thinking,
    with_output_limit,
    without_effort,
    without_field,
)
from helexa.cortex.backends.refused_messages_and_calls import (
    lacks_signatures,
    refuses_ids,
    refuses_names,
    refuses_order,
    refuses_parts,
    requires_reasoning,
    with_alternating_roles,
    with_any_signatures,
    with_plain_texts,
    with_reasoning,
    with_short_ids,
    with_short_names,
)
from helexa.cortex.backends.responses_api import (
    ResponsesAnswer,
    chat_body,
    offers_other_tools,
    read_responses_request,
    refuses_tool_types,
)
from helexa.cortex.forwarding.request import ClientRequest
from helexa.cortex.forwarding.request_body_limit_and_workers import BodyWorkers
from helexa.cortex.forwarding.token_bounds import CHAT, COMPLETIONS, RESPONSES
from helexa.cortex.upstream.connection_and_timeouts import UpstreamResponse
from helexa.cortex.upstream.error_responses import (
    CONTEXT_LENGTH_EXCEEDED,
    context_limit,
    has_uncounted_prompt,
    most_output,
    output_beside_prompt,
    read_error,
)

MAX_ATTEMPTS = 8  # several, because some backends name only one refused field in each error

_REFUSALS = (400, 422)
_TEMPLATE_ERRORS = (400, 422, 500)  # servers answer an error of a chat template with any of these
_NO_ROUTE = (404, 405, 501)


# Refusals of a chat request that the gateway can avoid by changing the request. For each refusal: the name of its flag
# in `Knowledge`, a function that returns whether an error is this refusal, and a function that changes the request.
_CHANGES: tuple[tuple[str, Callable[[bytes], bool], Callable[[bytes], bytes]], ...] = (
    ("alternates", refuses_order, with_alternating_roles),
    ("plain_texts", refuses_parts, with_plain_texts),
    ("reasons", requires_reasoning, with_reasoning),
    ("short_ids", refuses_ids, with_short_ids),
    ("signed", lacks_signatures, with_any_signatures),
)


@dataclass(frozen=True)
class BackendAttempt:
    """One attempt to send a request to a third-party backend."""

    path: str  # API path at the backend
    body: bytes  # body of the request
    knowledge: Knowledge  # what the gateway knew about the backend when it made the body
    optional: frozenset[str]  # names of fields that the gateway added, and may leave out
    # the client's request, if a chat completion answers a request of the Responses API; else None
    responses: ResponsesRequest | None = None
    changes: Changes = UNCHANGED  # what the gateway changed in the tool calls of the body

    @property
    def is_converted(self) -> bool:
        """Whether the gateway converts the response."""
        return self.path in (CHAT, COMPLETIONS, RESPONSES)

    def learn(self, status: int, error: bytes) -> Knowledge | None:
        """Return the knowledge, extended by what an error response shows.

        The result is None if the error shows nothing that another attempt could avoid.

        Args:
            status: HTTP status of the error response.
            error: body of the error response.
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
        if (
            status in _TEMPLATE_ERRORS
            and self.path in (CHAT, RESPONSES)
            and not self.knowledge.short_names
            and refuses_names(error)
            and with_short_names(self.body)[1]
        ):
            return replace(self.knowledge, short_names=True)
        if status in _TEMPLATE_ERRORS and self.path == CHAT:
            for name, is_refusal, change in _CHANGES:
                if not getattr(self.knowledge, name) and is_refusal(error) and change(self.body) != self.body:
                    return replace(self.knowledge, **{name: True})
            if not self.knowledge.no_effort and refuses_effort(error):
                return replace(self.knowledge, no_effort=True, refused=self.knowledge.refused | {EFFORT})
            if EFFORT in self.optional - self.knowledge.refused and refuses_thinking(error):
                return replace(self.knowledge, refused=self.knowledge.refused | {EFFORT})
        if status not in _REFUSALS or (refusal := read_error(status, error)).code == CONTEXT_LENGTH_EXCEEDED:
            return None  # an error about the context length may name fields because of their values
        if OUTPUT_LIMIT in self.optional and 0 < (most := most_output(refusal)) < (output_limit(self.body) or 0):
            return replace(self.knowledge, most_output=most)
        named = refused_fields(self.body, error)
        new = (named & self.optional) - self.knowledge.refused
        if not new:
            return None
        return replace(self.knowledge, refused=self.knowledge.refused | new)

    def limited(self, body: bytes, status: int, error: bytes) -> tuple[bytes, Knowledge] | None:
        """Return `body` with a fitting output limit or without one, and the new knowledge.

        The result is None unless the gateway translated the request `body`, and the error states that prompt and output
        limit together exceed the context. `body` is the argument from which `_new_attempt` made this attempt.
        """
        # Anthropic's clients must state an output limit, and coding agents state a limit that exceeds the context of
        # many models. Nodes of helexa lower the limit themselves.
        if OUTPUT_LIMIT not in self.optional or self.responses is not None or status not in _REFUSALS:
            return None
        limit, refusal = output_limit(self.body), read_error(status, error)
        if limit is None or refusal.code != CONTEXT_LENGTH_EXCEEDED:
            return None
        if has_uncounted_prompt(refusal):
            # Without a limit, vLLM generates as many tokens as fit into the context after the prompt. These are fewer
            # than `limit`.
            return without_field(body, OUTPUT_LIMIT), replace(self.knowledge, context=context_limit(refusal))
        most = output_beside_prompt(refusal, limit)
        return (with_output_limit(body, most), self.knowledge) if most else None

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
        """Return a successful response, converted to OpenAI's format.

        The caller checks `is_converted` first.

        Args:
            first_chunk: the bytes that were already read from `response`.
            input_tokens: estimated number of prompt tokens.
            streamed: True if the client requests a stream.
            on_estimate: called if the converted answer contains estimated token counts.
        """
        if self.path == RESPONSES:
            return NativeResponses(response, first_chunk, streamed=streamed, names=self.changes.names)
        chat = self.path == CHAT
        answer = BackendAnswer(
            response,
            first_chunk,
            model=model,
            chat=chat,
            streamed=streamed,
            conversation=self.body,
            changes=self.changes,
        )
        if self.responses is None:
            return answer
        return ResponsesAnswer(answer, self.responses, model=model, input_tokens=input_tokens, on_estimate=on_estimate)


def _new_attempt(
    path: str,
    body: bytes,
    *,
    translated: bool,
    adds_stream_options: bool,
    knowledge: Knowledge,
    thinks_by_effort: bool = False,
    keeps_limit: bool = False,
) -> BackendAttempt:
    """Return an attempt in the form that the backend probably accepts.

    Args:
        knowledge: what the gateway has learned about the backend.
        translated: True if the gateway translated the body from another API.
        adds_stream_options: True if the gateway added `stream_options` to a body that it did not translate.
        thinks_by_effort: True if the backend reads only `reasoning_effort`, and not `chat_template_kwargs`.
        keeps_limit: True if the request must have an output limit, because a budget depends on it.

    Raises:
        ApiError: 400: the request cannot be translated to a chat request.
    """
    responses = None
    if path == RESPONSES and (knowledge.lacks_responses or (knowledge.functions_only and offers_other_tools(body))):
        responses = read_responses_request(body)
        path, body, translated = CHAT, chat_body(responses), True
    optional = frozenset[str]()
    if translated:
        if knowledge.most_output or knowledge.context:
            body = _with_known_limit(body, knowledge, keeps_limit=keeps_limit)
        body = for_backend(body, knowledge.refused, thinks_by_effort=thinks_by_effort)
        optional = frozenset(OPTIONAL_FIELDS)
    elif adds_stream_options:
        optional = frozenset({STREAM_OPTIONS})
        body = without_field(body, STREAM_OPTIONS) if STREAM_OPTIONS in knowledge.refused else body
    names: dict[str, str] = {}
    if path == CHAT:
        body = without_billing_lines(body)
        for name, _, change in _CHANGES:
            body = change(body) if getattr(knowledge, name) else body
        body = without_effort(body) if knowledge.no_effort else body
    if path in (CHAT, RESPONSES) and knowledge.short_names:
        body, names = with_short_names(body)
    return BackendAttempt(path, body, knowledge, optional, responses, Changes(names, signed_ids=translated))


def _with_known_limit(body: bytes, knowledge: Knowledge, *, keeps_limit: bool) -> bytes:
    """Remove or lower an output limit that the backend is known to refuse."""
    limit = output_limit(body) or 0
    if 0 < knowledge.context <= limit and not keeps_limit:
        return without_field(body, OUTPUT_LIMIT)
    return with_output_limit(body, knowledge.most_output) if 0 < knowledge.most_output < limit else body


MAX_ERROR_BYTES = 64 << 10

# Sends a body to an API path of the backend. Returns the response, and the first bytes of its body.
Send = Callable[[str, bytes], Awaitable[tuple[UpstreamResponse, bytes]]]


class BackendRequests:
    """Sends requests to third-party backends, and remembers what each backend refuses."""

    def __init__(self, body_workers: BodyWorkers) -> None:
        self._body_workers = body_workers
        self._knowledge = BackendKnowledge()

    async def send(
        self, url: str, model: str, request: ClientRequest, body: bytes, send: Send, *, thinks_by_effort: bool = False
    ) -> tuple[UpstreamResponse, bytes, BackendAttempt]:
        """Send a request for the model `model` to the backend with the base URL `url`.

        If the backend refuses the request for a reason that the gateway can avoid, the gateway changes the request and
        sends it again, in at most `MAX_ATTEMPTS` attempts. This is safe, because a refused request generates nothing.

        Args:
            model: id of the model at the backend.
            body: body of the request for a third-party backend.
            send: function that sends a body to the backend.
            thinks_by_effort: True if the backend reads only `reasoning_effort`, and not `chat_template_kwargs`.

        Returns:
            The last response, which the caller must close, its first bytes (of an error response: all bytes up to
            `MAX_ERROR_BYTES`), and the last attempt.

        Raises:
            ApiError: 400: the request cannot be translated to the API of the backend. 503: see `BodyWorkers.run`.
            UpstreamError, or a subclass: the connection to the backend failed.
        """
        known = knowledge = self._knowledge.of(url, model)
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            attempt = await self._body_workers.run_if(
                request.large,
                _new_attempt,
                request.path,
                body,
                translated=request.translated,
                adds_stream_options=request.adds_stream_options,
                knowledge=knowledge,
                thinks_by_effort=thinks_by_effort,
                keeps_limit=request.enforced is not None,
            )
            response, chunk = await send(attempt.path, attempt.body)
            if response.status < 400:
                if knowledge is not known:
                    self._knowledge.add(url, model, knowledge)
                return response, chunk, attempt
            chunk = await _read_error(response, chunk)
            if not attempts_left:
                return response, chunk, attempt
            if (lesson := attempt.learn(response.status, chunk)) is not None:
                knowledge = lesson
            elif (limited := attempt.limited(body, response.status, chunk)) is not None:
                body, knowledge = limited
            else:
                return response, chunk, attempt
            response.close()
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
