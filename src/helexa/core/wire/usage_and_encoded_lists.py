"""Parts of OpenAI's responses: token usage, and lists encoded while they grow."""

from typing import Any, Literal, NotRequired, TypedDict

import orjson


class PromptTokensDetails(TypedDict):
    """The `prompt_tokens_details` of OpenAI's `usage` object."""

    cached_tokens: int  # number of prompt tokens that were found in the prefix cache
    image_tokens: NotRequired[int]  # number of prompt tokens that belong to images; absent without images


class CompletionTokensDetails(TypedDict):
    """The `completion_tokens_details` of OpenAI's `usage`: reasoning tokens."""

    reasoning_tokens: int


class HelexaTiming(TypedDict):
    """In a response's usage: durations of prefill and decode, uncached prompt tokens."""

    prefill_ms: int
    decode_ms: int
    prefill_tokens: int


class CacheMiss(TypedDict):
    """In a response's usage: why a long beginning of the prompt was computed again.

    The node compares the prompt with earlier prompts of the same account.
    """

    # `changed`: the prompt differs from the most similar earlier prompt at `position`. `evicted`: the KV pages from
    # `position` were neither in memory nor on disk any more. `no_state`: only the recurrent state was missing.
    reason: Literal["changed", "evicted", "no_state"]
    position: int  # index of the first token that was computed again
    message: NotRequired[int]  # index of the message with this token; absent if the token is in no message
    role: NotRequired[str]  # role of this message, or `tools` for the tool definitions
    text: NotRequired[str]  # text of the prompt around the position


class Usage(TypedDict):
    """OpenAI's `usage` object of a response. Details with only counts of 0 are absent."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    helexa_timing: HelexaTiming
    helexa_cache_miss: NotRequired[CacheMiss]


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    *,
    prefill_ms: float,
    decode_ms: float,
    cached_tokens: int = 0,
    reasoning_tokens: int = 0,
    image_tokens: int = 0,
    miss: CacheMiss | None = None,
) -> Usage:
    """Return OpenAI's `usage` object of a response.

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
    if miss is not None:
        result["helexa_cache_miss"] = miss
    return result


class Encoded:
    """A list whose elements are encoded to JSON when they are added.

    Encoding all elements of a long list together, at the end of a request, would block the event loop.
    """

    def __init__(self) -> None:
        self._elements: list[bytes] = []

    def __len__(self) -> int:
        return len(self._elements)

    def add(self, element: Any) -> None:
        """Encode `element` to JSON and append it to the list."""
        self._elements.append(orjson.dumps(element))

    def fragment(self, since: int = 0) -> orjson.Fragment:
        """Return a JSON list of the elements from index `since` to the end."""
        return orjson.Fragment(b"[%s]" % b",".join(self._elements[since:]))
