"""Checks of a prompt before a node sees it: refuses prompts that fit no tokenizer, and advises known clients."""

from typing import Any

import orjson

from helexa.core.errors import ApiError
from helexa.cortex.usage.token_limit import BYTES_PER_TOKEN
from helexa.http.connections.request_head import Headers

MAX_BYTES_PER_TOKEN = 128
"""The longest token of the common vocabularies: 128 spaces, in those of Llama 3 and Qwen 2.5 and 3."""

_MESSAGE_BYTES = 8
_ADVICE = {
    b"litellm": "retry 429 and 503 after Retry-After; context_length_exceeded is final until messages are shorter",
    b"agent-zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"agent zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"zed": "limits are in /v1/models as max_model_len and max_output_tokens",
}


def check_prompt(body: bytes, context: int) -> None:
    """Refuse a prompt whose text cannot fit into `context` tokens with any tokenizer.

    Only the node knows how many tokens a prompt has: four bytes of English are one token, as are one digit or 128
    spaces. The node judges every prompt that may fit, and its refusal states the exact count.

    Raises:
        ApiError: 400 `context_length_exceeded`, which states the size in bytes and the tokens as an estimate.
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

    Each message or item counts eight bytes more. Of several prompts (texts to be embedded) the longest counts. Token
    ids and images count nothing, nor does a body that only other JSON parsers can read.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return 0
    messages, prompt, items = content.get("messages"), content.get("prompt"), content.get("input")
    if isinstance(items, str):
        items = [{"content": items}]
    if isinstance(messages, list):
        return _of_messages(messages)
    if isinstance(prompt, str | list):
        return _of_prompts(prompt)
    if isinstance(items, list) and any(isinstance(item, dict) for item in items):
        instructions = [{"content": content["instructions"]}] if content.get("instructions") else []
        return _of_messages(instructions + items)
    return _of_prompts(items) if isinstance(items, list) else 0


def advice(headers: Headers) -> bytes | None:
    """Return a hint for users of a known client, the value of `X-Helexa-Advice`."""
    for header, value in headers:
        if header == b"user-agent":
            agent = value.lower()
            for name, text in _ADVICE.items():
                if name in agent:
                    return text.encode()
    return None


def _of_messages(messages: list[Any]) -> int:
    return sum(_MESSAGE_BYTES + _text_bytes(message) for message in messages)


def _of_prompts(prompt: str | list[Any]) -> int:
    """Return the bytes of a text, or of the longest of several texts."""
    texts = [prompt] if isinstance(prompt, str) else [one for one in prompt if isinstance(one, str)]
    return max((len(text.encode()) for text in texts), default=0)


def _text_bytes(message: Any) -> int:
    """Return the bytes of text in a message, or in an item of the Responses API such as a tool's output."""
    content = message.get("content") or message.get("output") if isinstance(message, dict) else None
    if isinstance(content, str):
        return len(content.encode())
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return sum(len(text.encode()) for text in texts if isinstance(text, str))
