"""API formats of servers: request bodies and streamed responses."""

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from helexa.bench.host_build_and_model import TargetKind
from helexa.bench.prompts_and_load_generators import PromptRequest
from helexa.bench.request_records_and_metrics import DeltaKind, RequestRecord
from helexa.core.sse import ServerSentEvent

Substitutes = Mapping[str, str | None]
"""Optional parameters of an API format.

The value is the parameter's replacement, or None to omit the parameter.
"""


class StreamError(Exception):
    """The streamed response contains an error or invalid data, or ended early."""


class ApiFormat(Protocol):
    """Interface of a wire format: builds request bodies, parses streamed responses."""

    path: str  # URL path of requests
    # Optional parameters that some models reject. The dict maps the name of each such parameter to the name of a
    # replacement. None as replacement means that the parameter is omitted.
    substitutes: Substitutes

    def headers(self, bearer: str | None) -> dict[str, str]:
        """Return the headers that every request needs, with the API key `bearer`."""
        ...

    def body(self, prompt: PromptRequest, *, ignore_eos: bool) -> dict[str, Any]:
        """Return the request body for `prompt`.

        Args:
            ignore_eos: True if the server supports the parameter `ignore_eos`.
        """
        ...

    def take(self, event: ServerSentEvent, record: RequestRecord) -> DeltaKind | None:
        """Parse an event of the stream and add its content to `record`.

        Returns:
            The kind of the event's content, or None if it has no content.

        Raises:
            StreamError: the event reports an error or is invalid.
        """
        ...


def number(value: object) -> int | None:
    """Return `value` from a server's JSON if it is an integer from 0 on, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None


def seconds(milliseconds: object) -> float | None:
    """Convert milliseconds from a server's JSON to seconds.

    Return None if `milliseconds` is not a valid duration.
    """
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, (int, float)) or not 0 <= milliseconds < 1e12:
        return None
    return milliseconds / 1000


def text(value: object) -> str:
    """Return `value` from a server's JSON if it is a string, else an empty string."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, Any]:
    """Return `value` from a server's JSON if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def error_text(error: object) -> str:
    """Return the message of an error from a server's JSON, at most 500 characters."""
    return (text(error) or text(mapping(error).get("message")) or "the server sent an error without a message")[:500]


_OPENAI_SUBSTITUTES: Substitutes = {
    "max_tokens": "max_completion_tokens",
    "top_p": None,
    "temperature": None,
    "ignore_eos": None,
    "stream_options": None,
}


class OpenAIChat:
    """Client side of OpenAI's chat completions API (`POST /v1/chat/completions`)."""

    path = "/v1/chat/completions"
    substitutes: Substitutes = _OPENAI_SUBSTITUTES

    def headers(self, bearer: str | None) -> dict[str, str]:
        """Return the headers that every request needs, with the API key `bearer`."""
        return {"authorization": f"Bearer {bearer}"} if bearer else {}

    def body(self, prompt: PromptRequest, *, ignore_eos: bool) -> dict[str, Any]:
        """Return the request body for `prompt`.

        Args:
            ignore_eos: True if the server supports the parameter `ignore_eos`.
        """
        body: dict[str, Any] = {
            "model": prompt.model,
            "messages": [{"role": turn.role, "content": turn.text} for turn in prompt.turns],
            "max_tokens": prompt.max_tokens,
            **prompt.sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if prompt.fixed_length and ignore_eos:
            body["ignore_eos"] = True
        if prompt.tools:
            body["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": dict(tool.parameters),
                    },
                }
                for tool in prompt.tools
            ]
        if prompt.schema is not None:
            form = {"name": "answer", "strict": True, "schema": dict(prompt.schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body

    def take(self, event: ServerSentEvent, record: RequestRecord) -> DeltaKind | None:
        """Add the content of a stream event to `record`, as specified by `ApiFormat.take`."""
        if event.data.strip() == "[DONE]":
            record.is_complete = True
            return None
        try:
            chunk = orjson.loads(event.data)
        except ValueError:
            raise StreamError("the server sent an event that is not JSON; check the kind of the target") from None
        if not isinstance(chunk, dict):
            raise StreamError("the server sent an event that is not a JSON object; check the kind of the target")
        if event.event == "error" or chunk.get("error"):
            raise StreamError(error_text(chunk.get("error") or chunk))
        choices = chunk.get("choices")
        choice = mapping(choices[0]) if isinstance(choices, list) and choices else {}
        record.finish_reason = text(choice.get("finish_reason")) or record.finish_reason
        record.counted_tokens = None
        _take_openai_usage(mapping(chunk.get("usage")), record)
        _take_timings(mapping(chunk.get("timings")), record)
        return _take_openai_delta(mapping(choice.get("delta")), record)


def _take_openai_delta(delta: dict[str, Any], record: RequestRecord) -> DeltaKind | None:
    kind: DeltaKind | None = None
    if text(delta.get("reasoning_content")) or text(delta.get("reasoning")):
        kind = "reasoning"
    calls = delta.get("tool_calls")
    for call in map(mapping, calls if isinstance(calls, list) else []):
        function = mapping(call.get("function"))
        if record.add_call(number(call.get("index")) or 0, text(function.get("name")), text(function.get("arguments"))):
            kind = "tool"
    if content := text(delta.get("content")) or text(delta.get("refusal")):
        record.texts.append(content)
        kind = "text"
    return kind


def _take_openai_usage(usage: dict[str, Any], record: RequestRecord) -> None:
    if not usage:
        return
    record.prompt_tokens = number(usage.get("prompt_tokens"))
    record.completion_tokens = record.counted_tokens = number(usage.get("completion_tokens"))
    cached = number(mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
    record.cached_tokens = record.cached_tokens if cached is None else cached
    record.reasoning_tokens = number(mapping(usage.get("completion_tokens_details")).get("reasoning_tokens"))
    timing = mapping(usage.get("helexa_timing"))
    computed = number(timing.get("prefill_tokens"))
    if record.cached_tokens is None and record.prompt_tokens is not None and computed is not None:
        record.cached_tokens = max(record.prompt_tokens - computed, 0)
    _take_node_timing(timing, record)


def _take_node_timing(timing: dict[str, Any], record: RequestRecord) -> None:
    """Store in `record` the durations that helexa reports in both API formats."""
    if timing:
        record.prefill_s = seconds(timing.get("prefill_ms"))
        record.decode_s = seconds(timing.get("decode_ms"))
        record.queue_s = seconds(timing.get("queue_ms"))


def _take_timings(timings: dict[str, Any], record: RequestRecord) -> None:
    """Store in `record` the durations and cached tokens that llama.cpp reports."""
    if not timings:
        return
    record.prefill_s = seconds(timings.get("prompt_ms"))
    record.decode_s = seconds(timings.get("predicted_ms"))
    record.cached_tokens = number(timings.get("cache_n"))


_VERSION = "2023-06-01"
_ANTHROPIC_SUBSTITUTES: Substitutes = {"top_p": None, "temperature": None}


class AnthropicMessages:
    """Client side of Anthropic's messages API (`POST /v1/messages`)."""

    path = "/v1/messages"
    substitutes: Substitutes = _ANTHROPIC_SUBSTITUTES

    def headers(self, bearer: str | None) -> dict[str, str]:
        """Return the headers that every request needs, with the API key `bearer`."""
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

    def take(self, event: ServerSentEvent, record: RequestRecord) -> DeltaKind | None:
        """Add the content of a stream event to `record`, as specified by `ApiFormat.take`."""
        try:
            payload = orjson.loads(event.data)
        except ValueError:
            raise StreamError("the server sent an event that is not JSON; check the kind of the target") from None
        payload = mapping(payload)
        match payload.get("type"):
            case "error":
                raise StreamError(error_text(payload.get("error")))
            case "message_start":
                _take_anthropic_usage(mapping(mapping(payload.get("message")).get("usage")), record)
            case "content_block_start":
                return _take_start(number(payload.get("index")) or 0, mapping(payload.get("content_block")), record)
            case "content_block_delta":
                return _take_anthropic_delta(number(payload.get("index")) or 0, mapping(payload.get("delta")), record)
            case "message_delta":
                reason = text(mapping(payload.get("delta")).get("stop_reason"))
                record.finish_reason = reason or record.finish_reason
                _take_anthropic_usage(mapping(payload.get("usage")), record)
            case "message_stop":
                record.is_complete = True
            case _:  # pings and future events
                pass
        return None


def _take_start(index: int, block: dict[str, Any], record: RequestRecord) -> DeltaKind | None:
    if block.get("type") == "tool_use" and record.add_call(index, text(block.get("name")), ""):
        return "tool"
    return _take_anthropic_delta(index, block, record)


def _take_anthropic_delta(index: int, delta: dict[str, Any], record: RequestRecord) -> DeltaKind | None:
    if content := text(delta.get("text")):
        record.texts.append(content)
        return "text"
    if text(delta.get("thinking")):
        return "reasoning"
    if (arguments := text(delta.get("partial_json"))) and record.add_call(index, "", arguments):
        return "tool"
    return None


def _take_anthropic_usage(usage: dict[str, Any], record: RequestRecord) -> None:
    """Store in `record` the token counts and server timings of `usage`.

    The first and the last event of a stream have this field. An output token count of 0 is ignored.
    """
    fresh = number(usage.get("input_tokens"))
    if fresh is not None:
        read = number(usage.get("cache_read_input_tokens")) or 0
        record.prompt_tokens = fresh + read + (number(usage.get("cache_creation_input_tokens")) or 0)
        record.cached_tokens = read
    record.completion_tokens = number(usage.get("output_tokens")) or record.completion_tokens
    _take_node_timing(mapping(usage.get("helexa_timing")), record)


def api_format_of(kind: TargetKind) -> ApiFormat:
    """Return the API format (OpenAI or Anthropic) that servers of `kind` accept."""
    return AnthropicMessages() if kind == "anthropic" else OpenAIChat()
