"""OpenAI's API format for chat completions, with timings and counts that llama.cpp, vLLM and helexa add."""

from typing import Any

import orjson

from helexa.bench.api_formats.api_format import Answer, StreamError, error_text, mapping, number, seconds, text
from helexa.bench.api_formats.rejected_parameters import Substitutes
from helexa.bench.measurement.prompt_request import PromptRequest
from helexa.bench.measurement.request_record import DeltaKind
from helexa.core.sse import ServerSentEvent

_SUBSTITUTES: Substitutes = {
    "max_tokens": "max_completion_tokens",
    "top_p": None,
    "temperature": None,
    "ignore_eos": None,
    "stream_options": None,
}


class OpenAIChat:
    """Client side of OpenAI's chat completions API (`POST /v1/chat/completions`)."""

    path = "/v1/chat/completions"
    substitutes: Substitutes = _SUBSTITUTES

    def headers(self, bearer: str | None) -> dict[str, str]:
        """Return the headers that every request needs, with the API key `bearer` if it is not None."""
        return {"authorization": f"Bearer {bearer}"} if bearer else {}

    def body(self, prompt: PromptRequest, *, ignore_eos: bool) -> dict[str, Any]:
        """Return the request body for `prompt`.

        Args:
            prompt: the request.
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

    def take(self, event: ServerSentEvent, answer: Answer) -> DeltaKind | None:
        """Add the content of a stream event to `answer`, as specified by `ApiFormat.take`."""
        if event.data.strip() == "[DONE]":
            answer.ended = True
            return None
        try:
            chunk = orjson.loads(event.data)
        except ValueError:
            raise StreamError("an event of the stream is not JSON") from None
        if not isinstance(chunk, dict):
            raise StreamError("an event of the stream is no object")
        if event.event == "error" or chunk.get("error"):
            raise StreamError(error_text(chunk.get("error") or chunk))
        choices = chunk.get("choices")
        choice = mapping(choices[0]) if isinstance(choices, list) and choices else {}
        answer.finish_reason = text(choice.get("finish_reason")) or answer.finish_reason
        answer.counted = None
        _take_usage(mapping(chunk.get("usage")), answer)
        _take_timings(mapping(chunk.get("timings")), answer)
        return _take_delta(mapping(choice.get("delta")), answer)


def _take_delta(delta: dict[str, Any], answer: Answer) -> DeltaKind | None:
    kind: DeltaKind | None = None
    if thought := text(delta.get("reasoning_content")) or text(delta.get("reasoning")):
        answer.reasoning.append(thought)
        kind = "reasoning"
    calls = delta.get("tool_calls")
    for call in map(mapping, calls if isinstance(calls, list) else []):
        function = mapping(call.get("function"))
        if answer.add_call(number(call.get("index")) or 0, text(function.get("name")), text(function.get("arguments"))):
            kind = "tool"
    if content := text(delta.get("content")) or text(delta.get("refusal")):
        answer.text.append(content)
        kind = "text"
    return kind


def _take_usage(usage: dict[str, Any], answer: Answer) -> None:
    if not usage:
        return
    answer.prompt_tokens = number(usage.get("prompt_tokens"))
    answer.completion_tokens = answer.counted = number(usage.get("completion_tokens"))
    cached = number(mapping(usage.get("prompt_tokens_details")).get("cached_tokens"))
    answer.cached_tokens = answer.cached_tokens if cached is None else cached
    answer.reasoning_tokens = number(mapping(usage.get("completion_tokens_details")).get("reasoning_tokens"))
    timing = mapping(usage.get("helexa_timing"))
    computed = number(timing.get("prefill_tokens"))
    if answer.cached_tokens is None and answer.prompt_tokens is not None and computed is not None:
        answer.cached_tokens = max(answer.prompt_tokens - computed, 0)
    if timing:
        answer.prefill_s = seconds(timing.get("prefill_ms"))
        answer.decode_s = seconds(timing.get("decode_ms"))
        answer.queue_s = seconds(timing.get("queue_ms"))


def _take_timings(timings: dict[str, Any], answer: Answer) -> None:
    """Store in `answer` the durations and the number of cached tokens that llama.cpp reports in `timings`."""
    if not timings:
        return
    answer.prefill_s = seconds(timings.get("prompt_ms"))
    answer.decode_s = seconds(timings.get("predicted_ms"))
    answer.cached_tokens = number(timings.get("cache_n"))
