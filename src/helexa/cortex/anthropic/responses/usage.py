"""Tokens as Anthropic counts them, and why an answer ended."""

from collections.abc import Mapping, Sequence
from typing import Any

_NOTHING_CREATED = {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0}
_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal"}


def anthropic_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """The `usage` of a `message_delta`, from that of a chat completion.

    Anthropic counts a prompt in parts that do not overlap: `input_tokens` are those that had to be computed,
    `cache_read_input_tokens` those that were found in the cache; the prompt is their sum. `helexa_timing`, which our
    nodes add, stays.
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
    """The `usage` of a whole message or of `message_start`, which has fields that a `message_delta` has not."""
    counts = anthropic_usage(usage)
    counts["cache_creation"] = _NOTHING_CREATED
    counts["service_tier"] = "standard"
    return counts


def prompt_usage(counts: Any) -> dict[str, Any] | None:
    """The usage of a chat completion that has said nothing yet, from the counts that our nodes send ahead."""
    if not isinstance(counts, dict):
        return None
    details = {"cached_tokens": counts.get("cached_tokens")}
    return {"prompt_tokens": counts.get("prompt_tokens"), "prompt_tokens_details": details}


def stop_reason(
    finish_reason: Any, matched: Any, *, called: bool, stop_sequences: Sequence[str]
) -> tuple[str, str | None]:
    """The `stop_reason` and `stop_sequence` of a message.

    Args:
        finish_reason: as the node said it.
        matched: what ended the answer, if the node says it: `stop_reason` of a choice.
        called: the message calls a tool.
        stop_sequences: what the client wanted it to end at.
    """
    if isinstance(finish_reason, str) and finish_reason in _STOP_REASONS:
        return _STOP_REASONS[finish_reason], None
    if called:  # some nodes say "stop" here
        return "tool_use", None
    if isinstance(matched, str) and matched in stop_sequences:
        return "stop_sequence", matched
    return "end_turn", None


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
