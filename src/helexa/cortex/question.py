"""A request as the gateway reads it: the bytes as they came, and just enough of their meaning to route them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from starlette.types import Receive

from helexa.core.errors import ApiError, invalid_body, malformed_json, missing_model
from helexa.core.fleet import Limit
from helexa.cortex.rewrite import rewrite
from helexa.http.hang_up import ClientGone

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"

_BYTES_PER_TOKEN = 4
_USUAL_OUTPUT = 4096
_MOST_ANSWERS = 128

Headers = list[tuple[bytes, bytes]]


class _Members(msgspec.Struct):
    """What is looked at of a body; the node judges the rest."""

    model: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    previous_response_id: Any = None
    stream_options: Any = None


_members = msgspec.json.Decoder(_Members)


@dataclass(frozen=True)
class Question:
    """One request for a model.

    Attributes:
        path: the API path, asked of the node too.
        headers: as the client sent them.
        body: JSON in the node's dialect: the client's own bytes, unless its dialect had to be translated.
        model: the name it asks for: a model id or an alias.
        stream: the answer is wanted as events.
        max_output: tokens that an answer may have, None when the client did not say.
        answers: how many are wanted.
        previous: the id of the response that it goes on from: a part of the prompt that only the node knows.
        strict: what makes the body one that servers of other makes take, where that differs.
        stream_options: the client's, None without any.
        metered: the gateway has to know the token counts of the answer, because a key pays for them.
    """

    path: str
    headers: Headers
    body: bytes
    model: str
    stream: bool = False
    max_output: int | None = None
    answers: int = 1
    previous: str | None = None
    strict: Callable[[bytes], bytes] | None = None
    stream_options: Mapping[str, Any] | None = None
    metered: bool = False

    @property
    def includes_usage(self) -> bool:
        """Whether a stream of the answer has a usage chunk by the client's own wish."""
        return self.stream_options is not None and self.stream_options.get("include_usage") is True

    @property
    def streams_chunks(self) -> bool:
        """Whether the answer is a stream of chat or completion chunks."""
        return self.stream and self.path in (CHAT, COMPLETIONS)

    @property
    def prompt_estimate(self) -> int:
        """About how many tokens the prompt has, as far as it was sent: a quarter of the body's bytes."""
        return max(1, len(self.body) // _BYTES_PER_TOKEN)

    def tokens(self, limit: Limit | None) -> int:
        """The most tokens that answering may take, which a budget must hold.

        Args:
            limit: the model's: its output for those who do not say how much they want, its input for those who go on
                from a response.
        """
        prompt = self.prompt_estimate
        if self.path == EMBEDDINGS:
            return prompt
        if self.previous is not None and limit is not None:
            prompt = max(prompt, limit.input or limit.context)
        return prompt + self.answers * (self.max_output or (limit and limit.output) or _USUAL_OUTPUT)

    def body_for(self, model: str, kind: str = "neuron") -> bytes:
        """Return the body that names `model`, for a node of this kind.

        A node of kind `neuron` gets the client's own bytes, in which at most the model's name is replaced. Of another
        node, a metered stream asks for usage in `stream_options`.

        Raises:
            ApiError: 400: the body cannot be written again.
        """
        body = self._naming(model)
        if kind != "neuron" and self.metered and self.streams_chunks and not self.includes_usage:
            body = rewrite(body, {"stream_options": {**(self.stream_options or {}), "include_usage": True}})
        return body if self.strict is None or kind == "neuron" else self.strict(body)

    def _naming(self, model: str) -> bytes:
        if model == self.model:
            return self.body
        member = re.compile(rb'("model"\s*:\s*)' + re.escape(orjson.dumps(self.model)))
        renamed, count = member.subn(lambda match: match[1] + orjson.dumps(model), self.body)
        if count == 1 and _members.decode(renamed).model == model:  # else the one match was not the name itself
            return renamed
        try:
            return orjson.dumps({**orjson.loads(self.body), "model": model})
        except (orjson.JSONDecodeError, orjson.JSONEncodeError) as error:
            raise malformed_json(str(error)) from None


def parse_question(path: str, headers: Headers, body: bytes) -> Question:
    """Read what matters to a gateway out of a body.

    Raises:
        ApiError: not JSON, not an object, or no model named.
    """
    try:
        if not body.isascii():
            body.decode()  # what is skipped below would not be looked at
        members = _members.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(body, error) from None
    if not isinstance(members.model, str) or not members.model:
        raise missing_model()
    limits = (members.max_completion_tokens, members.max_tokens, members.max_output_tokens)
    max_output = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    answers = min(members.n, _MOST_ANSWERS) if isinstance(members.n, int) and members.n > 1 else 1
    previous = members.previous_response_id if isinstance(members.previous_response_id, str) else None
    return Question(
        path,
        headers,
        body,
        members.model,
        members.stream is True,
        max_output,
        answers,
        previous,
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
    body = bytearray()  # a list of chunks would take many times the body's size if they are small
    while True:
        try:
            message = await receive()
        except TimeoutError:
            raise ApiError(408, "request_timeout", "the request body stopped arriving") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message["body"]
        if len(body) + len(chunk) > limit:
            raise _too_large(limit)
        if not message["more_body"] and not body:
            return chunk
        body += chunk
        if not message["more_body"]:
            return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the request body is larger than {limit} bytes")
