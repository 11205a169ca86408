"""A request as the gateway reads it: the bytes as they came, and just enough of their meaning to route them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import orjson
from starlette.types import Receive

from helexa.core.errors import ApiError, invalid_body, malformed_json, missing_model
from helexa.core.fleet import Limit
from helexa.cortex.requests.fields import read_fields
from helexa.cortex.requests.rewrite import rewrite
from helexa.cortex.usage.token_limit import (
    BYTES_PER_TOKEN,
    CHAT,
    COMPLETIONS,
    LIMIT_ALIASES,
    MULTIPLIERS,
    OUTPUT_LIMITS,
    Fields,
    Spending,
    read_spending,
)
from helexa.http.connections.client_disconnect import ClientGone
from helexa.http.connections.request_head import Headers

_PIECE_BYTES = 8 << 10
_USUAL_OUTPUT = 4096
_THIRD_PARTY_FIELDS = frozenset(Fields.__struct_fields__) | OUTPUT_LIMITS | LIMIT_ALIASES
_REFUSED_SPELLINGS = ("model",)


_fields = msgspec.json.Decoder(Fields)


class Question(msgspec.Struct, frozen=True):
    """One request for a model.

    Attributes:
        path: the API path, asked of the node too.
        headers: as the client sent them.
        body: JSON in the node's dialect: the client's own bytes, unless its dialect had to be translated.
        model: the name it asks for: a model id or an alias.
        spending: what it can make a node use.
        stream: the answer is wanted as events.
        previous: the id of the response that it goes on from: a part of the prompt that only the node knows.
        strict: what makes the body one that servers of other makes take, where that differs.
        stream_options: the client's, None without any.
        metered: the gateway has to know the token counts of the answer, because a key pays for them.
        enforced: the output limit that a budget holds, and that nodes are given; None without a budget.
        large: the work on the body is left to other processes, see `body_workers.is_large`.
    """

    path: str
    headers: Headers
    body: bytes
    model: str
    spending: Spending
    stream: bool = False
    previous: str | None = None
    strict: Callable[[bytes], bytes] | None = None
    stream_options: Mapping[str, Any] | None = None
    metered: bool = False
    enforced: int | None = None
    large: bool = False

    @property
    def includes_usage(self) -> bool:
        """Whether a stream of the answer has a usage chunk by the client's own wish."""
        return self.stream_options is not None and self.stream_options.get("include_usage") is True

    @property
    def translated(self) -> bool:
        """Whether the client speaks another API, whose first event has the counts of the prompt."""
        return self.strict is not None

    @property
    def streams_chunks(self) -> bool:
        """Whether the answer is a stream of chat or completion chunks."""
        return self.stream and self.path in (CHAT, COMPLETIONS)

    @property
    def prompt_estimate(self) -> int:
        """About how many tokens the prompt has, as far as it was sent: a quarter of the body's bytes."""
        return max(1, len(self.body) // BYTES_PER_TOKEN)

    def tokens(self, limit: Limit | None) -> int:
        """Return about how many tokens the answer takes, for limits per minute and for keys without a cap.

        Args:
            limit: the model's: its output for requests that state no limit, its input for those that continue a stored
                conversation.
        """
        prompt, spending = self.prompt_estimate, self.spending
        if spending.continues and limit is not None:
            prompt = max(prompt, limit.input or limit.context)
        output = (limit and limit.output) or _USUAL_OUTPUT if spending.output is None else spending.output
        return prompt + spending.answers * output

    def body_for(self, model: str, kind: str = "neuron") -> bytes:
        """Return the body that names `model`, for a node of this kind.

        A node of our own gets the client's own bytes, in which at most the model's name is replaced, and the output
        limit added if a budget holds one that the client does not state.

        A third-party backend gets each field once and in one spelling, so that it cannot read another model or limit
        than the gateway has checked. It is asked for the usage of a metered stream, and gets the output limit that a
        budget holds under one name.

        Raises:
            ApiError: 400: the body cannot be written again, or a third-party backend could read another `model` in it.
        """
        changes: dict[str, Any] = {}
        drop: set[str] = set()
        own, limit_field = kind == "neuron", self.spending.limit_field
        if self.enforced is not None and limit_field is not None and not (own and self.spending.output is not None):
            changes[limit_field] = self.enforced
        if not own:
            if self.metered and self.streams_chunks and not self.includes_usage:
                changes["stream_options"] = {**(self.stream_options or {}), "include_usage": True}
            if self.enforced is not None:
                drop = {*OUTPUT_LIMITS, *LIMIT_ALIASES, *MULTIPLIERS} - {limit_field} - self.spending.multipliers
            body = rewrite(self.body, {"model": model, **changes}, drop, _THIRD_PARTY_FIELDS, _REFUSED_SPELLINGS)
            return body if self.strict is None else self.strict(body)
        return rewrite(self.body, {"model": model, **changes}) if changes else self._naming(model)

    def _naming(self, model: str) -> bytes:
        if model == self.model:
            return self.body
        member = re.compile(rb'("model"\s*:\s*)' + re.escape(orjson.dumps(self.model)))
        found = member.search(self.body)
        if found is not None and member.search(self.body, found.end()) is None:
            renamed = b"%b%b%b" % (self.body[: found.end(1)], orjson.dumps(model), self.body[found.end() :])
            if _fields.decode(renamed).model == model:  # else the one match was not the name itself
                return renamed
        return rewrite(self.body, {"model": model})


def parse_question(path: str, headers: Headers, body: bytes) -> Question:
    """Read what matters to a gateway out of a body.

    Raises:
        ApiError: not JSON, not an object, no model named, or a number of the wrong type.
    """
    try:
        if not body.isascii():
            body.decode()  # what is skipped below would not be looked at
        members = read_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(body, error) from None
    if not isinstance(members.model, str) or not members.model:
        raise missing_model()
    return Question(
        path,
        headers,
        body,
        members.model,
        read_spending(path, members, body),
        members.stream is True,
        members.previous_response_id if isinstance(members.previous_response_id, str) else None,
        stream_options=members.stream_options if isinstance(members.stream_options, dict) else None,
    )


def _unreadable(body: bytes, error: Exception) -> ApiError:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as problem:
        return malformed_json(str(problem))
    if not isinstance(content, dict):
        return invalid_body("the request body must be a JSON object")
    return malformed_json(str(error))


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """Return all bytes of a request's body.

    Raises:
        ApiError: 413 for a length, declared or received, over `limit` bytes; 408 for a body that comes too slowly; 503
            if the server's memory for bodies is used up.
        ClientGone: the client hung up before its end.
    """
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    while True:
        try:
            message = await receive()
        except TimeoutError:
            raise ApiError(408, "request_timeout", "the request body stopped arriving") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message["body"]
        if size + len(chunk) > limit:
            raise _too_large(limit)
        size += len(chunk)
        if pieces and len(pieces[-1]) < _PIECE_BYTES:  # many small objects would take many times the body's size
            pieces[-1] += chunk
        else:
            pieces.append(chunk)
        if not message["more_body"]:
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the request body is larger than {limit} bytes")
