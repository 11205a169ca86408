"""Token usage of a request in the OpenAI API formats."""

from typing import NotRequired, TypedDict


class PromptTokensDetails(TypedDict):
    """The `prompt_tokens_details` object.

    Attributes:
        cached_tokens: number of prompt tokens that were found in the prefix cache.
        image_tokens: number of prompt tokens that belong to images; absent without images.
    """

    cached_tokens: int
    image_tokens: NotRequired[int]


class CompletionTokensDetails(TypedDict):
    """The `completion_tokens_details` object: the number of completion tokens that belong to reasoning."""

    reasoning_tokens: int


class HelexaTiming(TypedDict):
    """Durations of prefill and decode, and the number of prompt tokens that were not in the prefix cache."""

    prefill_ms: int
    decode_ms: int
    prefill_tokens: int


class Usage(TypedDict):
    """The `usage` object of a response. The two details objects are absent if their counts are 0."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    helexa_timing: HelexaTiming


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    *,
    prefill_ms: float,
    decode_ms: float,
    cached_tokens: int = 0,
    reasoning_tokens: int = 0,
    image_tokens: int = 0,
) -> Usage:
    """Return the `usage` object of a response.

    `prompt_tokens` includes cached tokens and image tokens, and `completion_tokens` includes reasoning tokens.
    """
    result = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        helexa_timing=HelexaTiming(
            prefill_ms=round(prefill_ms), decode_ms=round(decode_ms), prefill_tokens=prompt_tokens - cached_tokens
        ),
    )
    if cached_tokens or image_tokens:
        details = PromptTokensDetails(cached_tokens=cached_tokens)
        if image_tokens:
            details["image_tokens"] = image_tokens
        result["prompt_tokens_details"] = details
    if reasoning_tokens:
        result["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return result
