"""Rejects prompts that are certainly longer than the context length, and returns advice for known clients."""

from typing import Any

import orjson

from helexa.core.errors import ApiError
from helexa.cortex.usage.token_limit import BYTES_PER_TOKEN
from helexa.http.connections.request_head import Headers

MAX_BYTES_PER_TOKEN = 128
"""Bytes of the longest token in common vocabularies: 128 spaces, in those of Llama 3, Qwen 2.5 and Qwen 3."""

_MESSAGE_BYTES = 8
_ADVICE = {
    b"litellm": "retry 429 and 503 after Retry-After; context_length_exceeded is final until messages are shorter",
    b"agent-zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"agent zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"zed": "limits are in /v1/models as max_model_len and max_output_tokens",
}


def check_prompt(body: bytes, context: int) -> None:
    """Reject a prompt that is longer than `context` tokens, whatever the tokenizer.

    The gateway does not know the exact token count: one token can be four bytes of English, one digit, or 128 spaces.
    It therefore assumes `MAX_BYTES_PER_TOKEN` bytes per token, and accepts prompts that might fit. The node counts the
    tokens and may still reject the prompt.

    Raises:
        ApiError: 400 `context_length_exceeded`. The error contains the size in bytes and an estimated token count.
    """
    if not may_exceed(body, context):
        return
    size = prompt_bytes(body)
    if size > MAX_BYTES_PER_TOKEN * context:
        estimate = size // BYTES_PER_TOKEN
        raise ApiError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {context} tokens. However, your messages have {size} bytes of "
            f"text, an estimated {estimate} tokens. Please reduce the length of the messages.",
            param="messages",
            max=context,
            estimated_prompt_tokens=estimate,
        )


def may_exceed(body: bytes, context: int) -> bool:
    """Return whether the body is long enough to need `check_prompt`. The prompt of a shorter body always passes it."""
    return len(body) > MAX_BYTES_PER_TOKEN * context


def prompt_bytes(body: bytes) -> int:
    """Return the number of bytes of text in a request's prompt, plus eight bytes per message or item.

    If the request has several prompts or embedding texts, the length of the longest one is returned. Token ids and
    images count as 0 bytes. The result is 0 if the body is not valid JSON.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return 0
    messages, prompt, input_items = content.get("messages"), content.get("prompt"), content.get("input")
    if isinstance(input_items, str):
        input_items = [{"content": input_items}]
    if isinstance(messages, list):
        return _message_bytes(messages)
    if isinstance(prompt, str | list):
        return _longest_text_bytes(prompt)
    if isinstance(input_items, list) and any(isinstance(item, dict) for item in input_items):
        instructions = [{"content": content["instructions"]}] if content.get("instructions") else []
        return _message_bytes(instructions + input_items)
    return _longest_text_bytes(input_items) if isinstance(input_items, list) else 0


def advice(headers: Headers) -> bytes | None:
    """Return the value of the response header `X-Helexa-Advice`, or None if the user agent is not a known client."""
    for header, value in headers:
        if header == b"user-agent":
            user_agent = value.lower()
            for name, text in _ADVICE.items():
                if name in user_agent:
                    return text.encode()
    return None


def _message_bytes(messages: list[Any]) -> int:
    return sum(_MESSAGE_BYTES + _text_bytes(message) for message in messages)


def _longest_text_bytes(prompt: str | list[Any]) -> int:
    """Return the number of bytes of a text, or of the longest text in a list. Token ids in the list are ignored."""
    texts = [prompt] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, str)]
    return max((len(text.encode()) for text in texts), default=0)


def _text_bytes(message: Any) -> int:
    """Return the number of bytes of text in a message, or in an input item of the Responses API."""
    content = message.get("content") or message.get("output") if isinstance(message, dict) else None
    if isinstance(content, str):
        return len(content.encode())
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return sum(len(text.encode()) for text in texts if isinstance(text, str))
