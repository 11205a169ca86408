"""Types in responses of the Responses API: content parts of items, log-probabilities and token usage."""

from typing import Any, Literal, TypedDict

import orjson

from helexa.core.wire.usage import HelexaTiming

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Event = dict[str, Any]
"""Data of a server-sent event, without its `sequence_number`."""


class InputTokensDetails(TypedDict):
    """The number of cached prompt tokens. `cache_write_tokens` is always 0, because caching is automatic and free."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """The `output_tokens_details` object: the number of output tokens that belong to reasoning."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """The `usage` object of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    helexa_timing: HelexaTiming


class TopLogprob(TypedDict):
    """A likely token at a position of the output, with its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class Logprob(TopLogprob):
    """A token of the output with its log-probability, and the most likely tokens at the same position."""

    top_logprobs: list[TopLogprob]


class OutputText(TypedDict):
    """The content part of an output message (there is only one). `logprobs` is a JSON-encoded list of `Logprob`."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: orjson.Fragment


class SummaryText(TypedDict):
    """The only summary part of a reasoning item."""

    type: Literal["summary_text"]
    text: str


def output_text(text: str, logprobs: orjson.Fragment) -> OutputText:
    """Return the content part of an output message with `text`."""
    return OutputText(type="output_text", annotations=[], logprobs=logprobs, text=text)


def summary_text(text: str) -> SummaryText:
    """Return the summary part of a reasoning item with `text`."""
    return SummaryText(type="summary_text", text=text)


def response_usage(
    input_tokens: int,
    output_tokens: int,
    *,
    cached_tokens: int,
    reasoning_tokens: int,
    prefill_ms: float,
    decode_ms: float,
) -> ResponseUsage:
    """Return the `usage` object of a response.

    `input_tokens` includes cached tokens, and `output_tokens` includes reasoning tokens.
    """
    return ResponseUsage(
        input_tokens=input_tokens,
        input_tokens_details={"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        output_tokens=output_tokens,
        output_tokens_details={"reasoning_tokens": reasoning_tokens},
        total_tokens=input_tokens + output_tokens,
        helexa_timing=HelexaTiming(
            prefill_ms=round(prefill_ms), decode_ms=round(decode_ms), prefill_tokens=input_tokens - cached_tokens
        ),
    )
