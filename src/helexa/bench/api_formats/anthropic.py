"""Anthropic's API format for messages."""

from typing import Any

import orjson

from helexa.bench.api_formats.api_format import Answer, StreamError, error_text, mapping, number, seconds, text
from helexa.bench.api_formats.rejected_parameters import Substitutes
from helexa.bench.measurement.prompt_request import PromptRequest
from helexa.bench.measurement.request_record import DeltaKind
from helexa.core.sse import ServerSentEvent

_VERSION = "2023-06-01"
_SUBSTITUTES: Substitutes = {"top_p": None, "temperature": None}


class AnthropicMessages:
    """Client side of Anthropic's messages API (`POST /v1/messages`)."""

    path = "/v1/messages"
    substitutes: Substitutes = _SUBSTITUTES

    def headers(self, bearer: str | None) -> dict[str, str]:
        """Return the headers that every request needs, with the API key `bearer` if it is not None."""
        return {"anthropic-version": _VERSION} | ({"x-api-key": bearer} if bearer else {})

    def body(self, prompt: PromptRequest, *, ignore_eos: bool) -> dict[str, Any]:
        """Return the request body for `prompt`.

        `ignore_eos` is unused, because this API has no parameter to continue decoding after the end-of-sequence token.
        """
        system = "\n\n".join(turn.text for turn in prompt.turns if turn.role == "system")
        body: dict[str, Any] = {
            "model": prompt.model,
            "messages": [{"role": turn.role, "content": turn.text} for turn in prompt.turns if turn.role != "system"],
            "max_tokens": prompt.max_tokens,
            **prompt.sampling,
            "stream": True,
        }
        if system:
            body["system"] = system
        if prompt.tools:
            body["tools"] = [
                {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
                for tool in prompt.tools
            ]
        if prompt.schema is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": dict(prompt.schema)}}
        return body

    def take(self, event: ServerSentEvent, answer: Answer) -> DeltaKind | None:
        """Add the content of a stream event to `answer`, as specified by `ApiFormat.take`."""
        try:
            payload = orjson.loads(event.data)
        except ValueError:
            raise StreamError("an event of the stream is not JSON") from None
        payload = mapping(payload)
        match payload.get("type"):
            case "error":
                raise StreamError(error_text(payload.get("error")))
            case "message_start":
                _take_usage(mapping(mapping(payload.get("message")).get("usage")), answer)
            case "content_block_start":
                return _take_start(number(payload.get("index")) or 0, mapping(payload.get("content_block")), answer)
            case "content_block_delta":
                return _take_delta(number(payload.get("index")) or 0, mapping(payload.get("delta")), answer)
            case "message_delta":
                reason = text(mapping(payload.get("delta")).get("stop_reason"))
                answer.finish_reason = reason or answer.finish_reason
                _take_usage(mapping(payload.get("usage")), answer)
            case "message_stop":
                answer.ended = True
            case _:  # pings and future events
                pass
        return None


def _take_start(index: int, block: dict[str, Any], answer: Answer) -> DeltaKind | None:
    if block.get("type") == "tool_use" and answer.add_call(index, text(block.get("name")), ""):
        return "tool"
    return _take_delta(index, block, answer)


def _take_delta(index: int, delta: dict[str, Any], answer: Answer) -> DeltaKind | None:
    if content := text(delta.get("text")):
        answer.text.append(content)
        return "text"
    if thought := text(delta.get("thinking")):
        answer.reasoning.append(thought)
        return "reasoning"
    if (arguments := text(delta.get("partial_json"))) and answer.add_call(index, "", arguments):
        return "tool"
    return None


def _take_usage(usage: dict[str, Any], answer: Answer) -> None:
    """Store in `answer` the token counts and server timings from `usage`, a field of some stream events.

    The first and the last event of a stream have this field. An output token count of 0 is ignored.
    """
    fresh = number(usage.get("input_tokens"))
    if fresh is not None:
        read = number(usage.get("cache_read_input_tokens")) or 0
        answer.prompt_tokens = fresh + read + (number(usage.get("cache_creation_input_tokens")) or 0)
        answer.cached_tokens = read
    answer.completion_tokens = number(usage.get("output_tokens")) or answer.completion_tokens
    timing = mapping(usage.get("helexa_timing"))
    if timing:
        answer.prefill_s = seconds(timing.get("prefill_ms"))
        answer.decode_s = seconds(timing.get("decode_ms"))
        answer.queue_s = seconds(timing.get("queue_ms"))
