"""Checks a prompt before a node sees it: rejects prompts that fit no tokenizer, and advises known clients."""

from typing import Any

import orjson

from helexa.core.errors import ApiError
from helexa.cortex.usage.token_limit import BYTES_PER_TOKEN
from helexa.http.connections.request_head import Headers

MAX_BYTES_PER_TOKEN = 128
"""The longest token of common vocabularies: 128 spaces, in the vocabularies of Llama 3, Qwen 2.5 and Qwen 3."""

_MESSAGE_BYTES = 8
_ADVICE = {
    b"litellm": "retry 429 and 503 after Retry-After; context_length_exceeded is final until messages are shorter",
    b"agent-zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"agent zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"zed": "limits are in /v1/models as max_model_len and max_output_tokens",
}


def check_prompt(body: bytes, context: int) -> None:
    """Reject a prompt whose text cannot fit into `context` tokens with any tokenizer.

    Only the node knows the exact token count: four bytes of English, one digit, or 128 spaces can be one token. The
    node decides about every prompt that may fit, and its error states the exact count.

    Raises:
        ApiError: 400 `context_length_exceeded`, with the size in bytes and an estimate of the tokens.
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
    """Return whether `check_prompt` has to parse the body: its text may be as long as the whole body."""
    return len(body) > MAX_BYTES_PER_TOKEN * context


def prompt_bytes(body: bytes) -> int:
    """Return the bytes of text in a request's prompt.

    Each message or item counts eight bytes more. Of several prompts (texts for embeddings), the longest counts. Token
    ids and images count as 0, and so does a body that only other JSON parsers can read.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return 0
    messages, prompt, input_items = content.get("messages"), content.get("prompt"), content.get("input")
    if isinstance(input_items, str):
        input_items = [{"content": input_items}]
    if isinstance(messages, list):
        return _of_messages(messages)
    if isinstance(prompt, str | list):
        return _of_prompts(prompt)
    if isinstance(input_items, list) and any(isinstance(item, dict) for item in input_items):
        instructions = [{"content": content["instructions"]}] if content.get("instructions") else []
        return _of_messages(instructions + input_items)
    return _of_prompts(input_items) if isinstance(input_items, list) else 0


def advice(headers: Headers) -> bytes | None:
    """Return advice for users of a known client, the value of `X-Helexa-Advice`, or None."""
    for header, value in headers:
        if header == b"user-agent":
            user_agent = value.lower()
            for name, text in _ADVICE.items():
                if name in user_agent:
                    return text.encode()
    return None


def _of_messages(messages: list[Any]) -> int:
    return sum(_MESSAGE_BYTES + _text_bytes(message) for message in messages)


def _of_prompts(prompt: str | list[Any]) -> int:
    """Return the bytes of a text, or of the longest of several texts."""
    texts = [prompt] if isinstance(prompt, str) else [item for item in prompt if isinstance(item, str)]
    return max((len(text.encode()) for text in texts), default=0)


def _text_bytes(message: Any) -> int:
    """Return the bytes of text in a message, or in an item of the Responses API such as a tool's output."""
    content = message.get("content") or message.get("output") if isinstance(message, dict) else None
    if isinstance(content, str):
        return len(content.encode())
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return sum(len(text.encode()) for text in texts if isinstance(text, str))
