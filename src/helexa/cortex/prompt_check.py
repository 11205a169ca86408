"""What can be said of a prompt before a node has seen it: whether it can fit at all, and advice for known clients."""

from typing import Any

import orjson

from helexa.core.errors import ApiError
from helexa.cortex.headers import Headers

_BYTES_PER_TOKEN = 4
_MESSAGE_BYTES = 8
_ADVICE = {
    b"litellm": "retry 429 and 503 after Retry-After; context_length_exceeded is final until messages are shorter",
    b"agent-zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"agent zero": "limits are in /v1/models; compact before `limit.input` is reached",
    b"zed": "limits are in /v1/models as max_model_len and max_output_tokens",
}


def estimated_tokens(body: bytes) -> int:
    """About how many tokens a request's prompt has, at least one: a quarter of its text's bytes.

    Eight bytes more count for each message or item. Token ids are counted, and of several prompts, as there are texts
    to be embedded, the longest one counts. A body without any prompt counts as a whole, and so does one that only other
    parsers can read.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        content = {}
    messages, prompt, items = content.get("messages"), content.get("prompt"), content.get("input")
    if isinstance(items, str):
        items = [{"content": items}]
    if isinstance(messages, list):
        tokens = _of_messages(messages)
    elif isinstance(prompt, str | list):
        tokens = _of_prompts(prompt)
    elif isinstance(items, list) and any(isinstance(item, dict) for item in items):
        instructions = [{"content": content["instructions"]}] if content.get("instructions") else []
        tokens = _of_messages(instructions + items)
    elif isinstance(items, list):
        tokens = _of_prompts(items)
    else:
        tokens = len(body) // _BYTES_PER_TOKEN
    return max(1, tokens)


def check_prompt(body: bytes, context: int) -> None:
    """Refuse a prompt that cannot fit into `context` tokens by far, before it costs a node anything.

    Raises:
        ApiError: 400 `context_length_exceeded`.
    """
    if len(body) // _BYTES_PER_TOKEN <= context:  # the text is no longer than the body
        return
    estimate = estimated_tokens(body)
    if estimate > context:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {context} tokens. However, your messages resulted in about "
            f"{estimate} tokens. Please reduce the length of the messages.",
            param="messages",
            max=context,
            estimated_prompt_tokens=estimate,
        )


def advice(headers: Headers) -> bytes | None:
    """A hint for the people behind a known client, as the value of `X-Helexa-Advice`."""
    for header, value in headers:
        if header == b"user-agent":
            agent = value.lower()
            for name, text in _ADVICE.items():
                if name in agent:
                    return text.encode()
    return None


def _of_messages(messages: list[Any]) -> int:
    return sum(_MESSAGE_BYTES + _text_bytes(message) for message in messages) // _BYTES_PER_TOKEN


def _of_prompts(prompt: str | list[Any]) -> int:
    """Of a text, of token ids, or of the longest of several of these."""
    if isinstance(prompt, str):
        return len(prompt.encode()) // _BYTES_PER_TOKEN
    ids = [len(one) for one in prompt if isinstance(one, list)]
    texts = [len(one.encode()) // _BYTES_PER_TOKEN for one in prompt if isinstance(one, str)]
    return max(ids + texts, default=len(prompt))


def _text_bytes(message: Any) -> int:
    """Of a message, or of an item of Responses, which may be what a call came to."""
    content = message.get("content") or message.get("output") if isinstance(message, dict) else None
    if isinstance(content, str):
        return len(content.encode())
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return sum(len(text.encode()) for text in texts if isinstance(text, str))
