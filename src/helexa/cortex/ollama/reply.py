"""Responses to clients of Ollama's API, translated from the nodes' responses."""

from collections.abc import Sequence
from typing import Any

import orjson
from starlette.types import Send

from helexa.core.errors import ApiError
from helexa.cortex.forwarding.client_reply import Reply
from helexa.cortex.forwarding.token_bounds import EMBEDDINGS
from helexa.cortex.forwarding.translated_reply import TranslatedReply, read_completion
from helexa.cortex.ollama.answer import Answer, AnswerStream, complete_answer, embeddings_answer, to_ollama_error
from helexa.cortex.ollama.to_openai import EMBED_API, EMBEDDINGS_API, Translation
from helexa.cortex.request_record import RequestRecord
from helexa.cortex.upstream.response_body import as_json

VERSION = "0.33.0"  # Version of Ollama whose API the gateway serves. Some clients require a minimum version.

_IGNORED_HEADER = b"x-helexa-ignored"


class OllamaReply(TranslatedReply):
    """Translates a node's response to Ollama's API, and sends it."""

    stream_type = b"application/x-ndjson"

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._request: tuple[Translation, RequestRecord] | None = None

    def answers(self, translation: Translation, record: RequestRecord, ignored: Sequence[str] = ()) -> None:
        """Set the request of the response. Before, only an error response can be sent.

        A header names the options of the request without effect, and the fields in `ignored`.
        """
        self._request = translation, record
        if names := [*translation.ignored, *ignored]:
            self.headers.append((_IGNORED_HEADER, ",".join(names).encode()))

    def expects_stream(self) -> bool:
        """Return whether the client requests a stream."""
        return self._translation.stream

    def new_translator(self) -> AnswerStream:
        """Return the object that translates the node's stream to lines of JSON."""
        return AnswerStream(self._answer)

    def translate(self, status: int, body: bytes, retry_after: int | None) -> bytes:
        """Translate a node's non-streaming response."""
        if self._translation.path == EMBEDDINGS and 200 <= status < 300:
            return embeddings_answer(self._translation, self._record, body)
        return as_json(complete_answer(self._answer, read_completion(status, body, retry_after)))

    def error_response(self, error: ApiError) -> tuple[bytes, dict[str, str]]:
        """Return body and headers of an error response in Ollama's format."""
        return orjson.dumps(to_ollama_error(error)), error.headers()

    async def send_done(self, reason: str) -> None:
        """Send the response to a request that only loads or unloads a model."""
        line = as_json(self._nothing(reason)) + b"\n"
        if self._translator is None:
            await self._send_complete(200, [], line)
        else:
            await Reply.write(self, line)
        await Reply.finish(self)

    def _nothing(self, reason: str) -> dict[str, Any]:
        if self._translation.api == EMBEDDINGS_API:
            return {"embedding": []}
        if self._translation.api == EMBED_API:
            return {"model": self._translation.model, "embeddings": []}
        return self._answer.ended(self._answer.part(), reason)

    @property
    def _translation(self) -> Translation:
        assert self._request is not None
        return self._request[0]

    @property
    def _record(self) -> RequestRecord:
        assert self._request is not None
        return self._request[1]

    @property
    def _answer(self) -> Answer:
        return Answer(self._translation, self._record)
