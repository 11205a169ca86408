"""A request as the gateway reads it: the bytes as they came, and just enough of their meaning to route them."""

import asyncio
import re
from dataclasses import dataclass

import orjson
from starlette.types import Receive

from helexa.core.errors import ApiError, invalid_body, malformed_json, missing_model

BODY_IDLE_SECS = 60.0


class ClientGone(Exception):
    """The client hung up."""


@dataclass(frozen=True)
class Question:
    """One request for a model.

    Attributes:
        path: the API path, asked of the node too.
        headers: as the client sent them.
        body: the client's JSON, verbatim.
        model: the name it asks for: a model id or an alias.
    """

    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes
    model: str

    def body_for(self, model: str) -> bytes:
        """The body that names `model`: the client's own bytes, in which at most the name is replaced."""
        if model == self.model:
            return self.body
        member = re.compile(rb'("model"\s*:\s*)' + re.escape(orjson.dumps(self.model)))
        renamed, count = member.subn(lambda match: match[1] + orjson.dumps(model), self.body)
        if count == 1 and orjson.loads(renamed)["model"] == model:  # else the one match was not the name itself
            return renamed
        return orjson.dumps({**orjson.loads(self.body), "model": model})


def parse_question(path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> Question:
    """Read the model's name out of a body.

    Raises:
        ApiError: not JSON, not an object, or no model named.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise malformed_json(str(error)) from None
    if not isinstance(content, dict):
        raise invalid_body("the request body must be a JSON object")
    model = content.get("model")
    if not isinstance(model, str) or not model:
        raise missing_model()
    return Question(path, headers, body, model)


async def read_body(receive: Receive, headers: list[tuple[bytes, bytes]], limit: int) -> bytes:
    """All bytes of a request's body.

    Raises:
        ApiError: it is, or says it will be, longer than `limit` bytes; or none of it came for `BODY_IDLE_SECS`.
        ClientGone: the client hung up before its end.
    """
    declared = dict(headers).get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(BODY_IDLE_SECS):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, "request_timeout", "the request body stopped arriving") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "request_too_large", f"the request body is larger than {limit} bytes")
