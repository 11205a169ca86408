"""Responses of Ollama's API, translated from the nodes' answers and streams."""

import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import orjson
from starlette.types import Send

from helexa.core.errors import ApiError
from helexa.cortex.forwarding.client_reply_and_error_events import Reply
from helexa.cortex.forwarding.token_bounds import EMBEDDINGS
from helexa.cortex.forwarding.translated_reply import (
    StreamTranslator,
    TranslatedReply,
    call_as_text,
    first_choice,
    read_completion,
    reasoning,
)
from helexa.cortex.ollama.to_openai import CHAT_API, EMBED_API, EMBEDDINGS_API, Translation
from helexa.cortex.request_record import RequestRecord
from helexa.cortex.upstream.response_body import as_json, malformed, parse_arguments

VERSION = "0.33.0"  # Version of Ollama whose API the gateway serves. Some clients require a minimum version.
_IGNORED_HEADER = b"x-helexa-ignored"

MAX_BUFFERED_CHARS = 4 << 20
MAX_CALLS = 512
_MAX_NAME_CHARS = 1024
_REASON_CHARS = 64
_NS_PER_MS = 1_000_000
_REASONS = {"stop": "stop", "tool_calls": "stop", "function_call": "stop", "length": "length"}
_REASONS |= {"content_filter": "content_filter"}


class Answer:
    """Builds the JSON objects of the response to `/api/chat` or `/api/generate`.

    Args:
        translation: the translated request of the client.
        record: the request record, which has the times of the request.
    """

    def __init__(self, translation: Translation, record: RequestRecord) -> None:
        self._is_chat = translation.api == CHAT_API
        self._model = translation.model
        self._record = record

    def part(
        self,
        text: str = "",
        *,
        thinking: str = "",
        calls: Sequence[Mapping[str, Any]] = (),
        logprobs: Sequence[Mapping[str, Any]] = (),
        done: bool = False,
    ) -> dict[str, Any]:
        """Return one JSON object of the response: a part of a stream, or a whole answer."""
        content: dict[str, Any] = {"role": "assistant", "content": text} if self._is_chat else {"response": text}
        if thinking:
            content["thinking"] = thinking
        if calls:
            content["tool_calls"] = calls
        fields: dict[str, Any] = {"model": self._model, "created_at": now()}
        fields |= {"message": content} if self._is_chat else content
        fields["done"] = done
        if logprobs:
            fields["logprobs"] = logprobs
        return fields

    def ended(self, part: dict[str, Any], reason: str, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return `part` as the last object, with its reason, token counts and durations."""
        return part | {"done": True, "done_reason": reason} | self._durations(usage)

    def _durations(self, usage: Mapping[str, Any] | None) -> dict[str, int]:
        """Return token counts, and durations in nanoseconds.

        Nodes of helexa report how long prefill and decode took. For other nodes, the gateway measures the time until
        the first content of a stream, and the time from there to the end. Without `usage`, only the total duration and
        the load duration are returned.
        """
        record, end = self._record, time.perf_counter()
        counts = {"total_duration": end - record.started, "load_duration": record.loading}
        durations = {name: round(seconds * 1e9) for name, seconds in counts.items()}
        if usage is None:
            return durations
        durations["prompt_eval_count"] = _count(usage.get("prompt_tokens"))
        timing = usage.get("helexa_timing")
        if isinstance(timing, dict):
            durations["prompt_eval_duration"] = _count(timing.get("prefill_ms")) * _NS_PER_MS
            eval_duration = _count(timing.get("decode_ms")) * _NS_PER_MS
        else:
            first_at, forwarded = record.meter and record.meter.first_at, record.started + (record.waited or 0.0)
            if first_at is not None:
                durations["prompt_eval_duration"] = round((first_at - forwarded) * 1e9)
            eval_duration = round((end - (first_at or forwarded)) * 1e9)
        return durations | {"eval_count": _count(usage.get("completion_tokens")), "eval_duration": eval_duration}


class ToolCalls:
    """Collects the deltas of tool calls. Ollama's clients expect each call as a whole."""

    def __init__(self) -> None:
        self._calls: dict[int, dict[str, str]] = {}
        self._chars = 0

    def add(self, delta: Any) -> None:
        """Add one element of `tool_calls` of a chat completion chunk or message.

        Raises:
            ApiError: 502 `upstream_malformed_response`: the element is malformed, or there are too many or too long
                calls.
        """
        function = delta.get("function") or {} if isinstance(delta, dict) else None
        if not isinstance(function, dict):
            raise malformed("a tool call in the response is not a JSON object")
        index = delta.get("index")
        if type(index) is not int:
            index = len(self._calls) - (0 if function.get("name") else 1)
        call = self._calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
        for name, value in (("id", delta.get("id")), ("name", function.get("name"))):
            if isinstance(value, str) and not call[name]:
                call[name] = value[:_MAX_NAME_CHARS]
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            arguments = as_json(arguments).decode()
        if isinstance(arguments, str):
            call["arguments"] += arguments
            self._chars += len(arguments)
        if len(self._calls) > MAX_CALLS or self._chars > MAX_BUFFERED_CHARS:
            raise malformed(
                f"the response has more than {MAX_CALLS} tool calls, or more than {MAX_BUFFERED_CHARS} characters of "
                "arguments"
            )

    def finished(self) -> tuple[list[dict[str, Any]], str]:
        """Return the complete calls in Ollama's format, and the incomplete calls as text."""
        calls: list[dict[str, Any]] = []
        texts: list[str] = []
        for call in self._calls.values():
            arguments = parse_arguments(call["arguments"])
            if not call["name"] or arguments is None:
                texts.append(call_as_text(call["name"], call["arguments"]))
                continue
            function = {"index": len(calls), "name": call["name"], "arguments": arguments}
            calls.append(({"id": call["id"]} if call["id"] else {}) | {"function": function})
        return calls, "\n".join(texts)


def complete_answer(answer: Answer, completion: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a node's completion to Ollama's response without a stream.

    Raises:
        ApiError: 502 `upstream_malformed_response`: the completion is malformed.
    """
    choice = first_choice(completion)
    if choice is None:
        raise malformed("the response has no choice")
    message = choice.get("message")
    message = message if isinstance(message, dict) else {"content": choice.get("text")}
    calls = ToolCalls()
    for call in _list(message.get("tool_calls")):
        calls.add({**call, "index": None} if isinstance(call, dict) else call)
    complete, incomplete = calls.finished()
    part = answer.part(
        text_of(message) + incomplete,
        thinking=string(reasoning(message)),
        calls=complete,
        logprobs=_logprobs_of(choice),
    )
    usage = completion.get("usage")
    reason = done_reason(choice.get("finish_reason"))
    return answer.ended(part, reason, usage if isinstance(usage, dict) else {})


def done_reason(finish_reason: Any) -> str:
    """Return Ollama's `done_reason` for the finish reason of a choice.

    Raises:
        ApiError: 502 `upstream_malformed_response`: the finish reason is unknown, so the answer may be incomplete.
    """
    if not isinstance(finish_reason, str) or finish_reason not in _REASONS:
        raise malformed(f"the finish reason '{str(finish_reason)[:_REASON_CHARS]}' is unknown")
    return _REASONS[finish_reason]


def _logprobs_of(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the log-probabilities of a choice in Ollama's format."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return []
    if "tokens" not in logprobs:
        return [_token(entry) for entry in _list(logprobs.get("content")) if isinstance(entry, dict)]
    columns = (_list(logprobs.get(name)) for name in ("tokens", "token_logprobs"))
    entries = [{"token": token, "logprob": logprob} for token, logprob in zip(*columns, strict=False)]
    for entry, top in zip(entries, _list(logprobs.get("top_logprobs")), strict=False):
        if isinstance(top, dict) and top.keys() - {entry["token"]}:  # skip a list that has only the chosen token
            entry["top_logprobs"] = [{"token": token, "logprob": logprob} for token, logprob in top.items()]
    return entries


def text_of(message: Mapping[str, Any]) -> str:
    """Return the content and the refusal of a message or delta as one text."""
    return string(message.get("content")) + string(message.get("refusal"))


def string(value: Any) -> str:
    """Return `value` for Ollama's reply if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


def now() -> str:
    """Return the current time in UTC for Ollama's replies, in RFC 3339's format."""
    return f"{datetime.now(UTC).isoformat()[:-6]}Z"


def _token(entry: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: entry[name] for name in ("token", "logprob", "bytes") if entry.get(name) is not None}
    if tops := [_token(top) for top in _list(entry.get("top_logprobs")) if isinstance(top, dict)]:
        fields["top_logprobs"] = tops
    return fields


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


class _Item(msgspec.Struct):
    embedding: msgspec.Raw
    index: int = 0


class _Embeddings(msgspec.Struct):
    data: list[_Item]
    usage: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Embeddings)
_vector = msgspec.json.Decoder(list[float])


def embeddings_answer(translation: Translation, record: RequestRecord, body: bytes) -> bytes:
    """Translate a node's `/v1/embeddings` response to Ollama's reply.

    If the client wants fewer dimensions than the vectors have, the vectors are cut off and normalized again, as Ollama
    does.

    Raises:
        ApiError: 502 `upstream_malformed_response`: the body is malformed.
    """
    try:
        embeddings = _decoder.decode(body)
        items = sorted(embeddings.data, key=lambda item: item.index)
        vectors = [_shortened(item.embedding, translation.dimensions) for item in items]
    except (msgspec.DecodeError, RecursionError) as error:
        raise malformed(str(error)[:100]) from None
    if translation.api == EMBEDDINGS_API:
        if not vectors:
            raise malformed("the response has no embedding")
        return b'{"embedding":%b}' % bytes(vectors[0])
    count = (embeddings.usage or {}).get("prompt_tokens")
    fields = {
        "model": translation.model,
        "embeddings": [msgspec.Raw(vector) for vector in vectors],
        "total_duration": round((time.perf_counter() - record.started) * 1e9),
        "load_duration": round(record.loading * 1e9),
        "prompt_eval_count": count if type(count) is int and count > 0 else 0,
    }
    return msgspec.json.encode(fields)


def _shortened(vector: msgspec.Raw, dimensions: int | None) -> bytes | msgspec.Raw:
    if dimensions is None:
        return vector
    numbers = _vector.decode(vector)[:dimensions]
    # A shortened vector is no longer a unit vector, but clients compare embeddings by their scalar product.
    norm = math.sqrt(math.fsum(number * number for number in numbers))
    return msgspec.json.encode([number / norm for number in numbers] if norm else numbers)


class AnswerStream(StreamTranslator):
    """Converts a node's event stream to Ollama's lines of JSON."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._answer = answer
        self._calls = ToolCalls()
        self._usage: dict[str, Any] = {}
        self._finish_reason: Any = None

    def _keep_alive(self) -> None:
        self._add(self._answer.part())

    def _read(self, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choice = first_choice(event)
        if choice is None:
            return
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else {"content": choice.get("text")}
        text, thinking, logprobs = text_of(delta), string(reasoning(delta)), _logprobs_of(choice)
        if text or thinking or logprobs:
            self._add(self._answer.part(text, thinking=thinking, logprobs=logprobs))
        calls = delta.get("tool_calls")
        # Ollama's clients expect each tool call as a whole, so the pieces of calls are collected until `_end`.
        for call in calls if isinstance(calls, list) else ():
            self._calls.add(call)
        if choice.get("finish_reason") is not None:
            self._finish_reason = choice["finish_reason"]

    def _end(self) -> None:
        if self._finish_reason is None:
            raise malformed("the answer ended without a finish reason")
        reason = done_reason(self._finish_reason)
        calls, incomplete = self._calls.finished()
        if calls or incomplete:
            self._add(self._answer.part(incomplete, calls=calls))
        self._add(self._answer.ended(self._answer.part(), reason, self._usage))

    def _fail(self, error: ApiError) -> None:
        self._add(to_ollama_error(error))

    def _add(self, value: dict[str, Any]) -> None:
        self._out.append(as_json(value) + b"\n")


def to_ollama_error(error: ApiError) -> dict[str, Any]:
    """Return Ollama's body of an error response, or last line of a failed stream."""
    return {"error": str(error)}


class OllamaReply(TranslatedReply):
    """Translates a node's response to Ollama's API, and sends it."""

    stream_type = b"application/x-ndjson"

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._request: tuple[Translation, RequestRecord] | None = None

    def answers(self, translation: Translation, record: RequestRecord, ignored: Sequence[str] = ()) -> None:
        """Set the request to answer. Before this call, only an error can be sent.

        A header names the options of the request that have no effect, and the fields in `ignored`.
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
