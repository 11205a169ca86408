"""Token counts and stop reasons in Anthropic's format."""

from collections.abc import Mapping, Sequence
from typing import Any

_NOTHING_CREATED = {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0}
_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


def anthropic_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the usage of a chat completion to the `usage` of a `message_delta` event.

    In Anthropic's format, `input_tokens` does not include the cached prompt tokens, which are in
    `cache_read_input_tokens`. The field `helexa_timing`, which helexa's own nodes add, is copied.
    """
    prompt = _count(usage.get("prompt_tokens"))
    cached = min(_count(_member(usage.get("prompt_tokens_details"), "cached_tokens")), prompt)
    counts: dict[str, Any] = {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": _count(usage.get("completion_tokens")),
    }
    if reasoning := _count(_member(usage.get("completion_tokens_details"), "reasoning_tokens")):
        counts["output_tokens_details"] = {"thinking_tokens": reasoning}
    timing = usage.get("helexa_timing")
    if isinstance(timing, dict):
        counts["helexa_timing"] = {name: value for name, value in timing.items() if type(value) in (int, float)}
    return counts


def message_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the usage of a chat completion to the `usage` of a message or of a `message_start` event.

    The result has the fields of `anthropic_usage`, and in addition `cache_creation` and `service_tier`.
    """
    counts = anthropic_usage(usage)
    counts["cache_creation"] = _NOTHING_CREATED
    counts["service_tier"] = "standard"
    return counts


def prompt_usage(counts: Any) -> dict[str, Any] | None:
    """Convert the prompt token counts in a node's stream event to the `usage` format of a chat completion.

    Helexa's own nodes send these counts before the output. The result is None if `counts` is not a JSON object.
    """
    if not isinstance(counts, dict):
        return None
    details = {"cached_tokens": counts.get("cached_tokens")}
    return {"prompt_tokens": counts.get("prompt_tokens"), "prompt_tokens_details": details}


def stop_reason(
    finish_reason: Any, matched: Any, *, called: bool, stop_sequences: Sequence[str]
) -> tuple[str, str | None]:
    """Return the `stop_reason` and `stop_sequence` of a message.

    Args:
        finish_reason: the `finish_reason` of the chat completion.
        matched: the field `stop_reason` of the chat completion's choice. In this field, some nodes report the stop
            sequence that ended the output.
        called: True if the message calls a tool.
        stop_sequences: the client's stop sequences.
    """
    if isinstance(finish_reason, str) and finish_reason in _STOP_REASONS:
        return _STOP_REASONS[finish_reason], None
    if called:  # some nodes report "stop" for tool calls
        return "tool_use", None
    if isinstance(matched, str) and matched in stop_sequences:
        return "stop_sequence", matched
    return "end_turn", None


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
