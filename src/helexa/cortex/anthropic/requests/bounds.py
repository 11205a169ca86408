"""Limits on the number of messages, content blocks and tools in a request of the Messages API."""

from collections.abc import Mapping
from typing import Any

from helexa.core.errors import ApiError
from helexa.cortex.anthropic.errors import invalid_anthropic_body

MAX_MESSAGES = 100_000  # the limit of Anthropic's own API
MAX_BLOCKS = 200_000
MAX_TOOLS = 10_000


def check_bounds(body: Mapping[str, Any]) -> None:
    """Reject a request with too many messages, content blocks or tools.

    Raises:
        ApiError: 400 `invalid_anthropic_body`, naming the limit.
    """
    messages, tools = body.get("messages"), body.get("tools")
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise _too_many("messages", "messages", MAX_MESSAGES, len(messages))
    if isinstance(tools, list) and len(tools) > MAX_TOOLS:
        raise _too_many("tools", "tools", MAX_TOOLS, len(tools))
    contents = [body.get("system")]
    if isinstance(messages, list):
        contents += [message.get("content") for message in messages if isinstance(message, dict)]
    count = 0
    while contents:
        content = contents.pop()
        if not isinstance(content, list):
            continue
        count += len(content)
        if count > MAX_BLOCKS:
            raise _too_many("messages", "content blocks in all", MAX_BLOCKS, count)
        for block in content:
            if isinstance(block, dict):  # tool results, documents and search results contain blocks
                source = block.get("source")
                contents += (block.get("content"), source.get("content") if isinstance(source, dict) else None)


def _too_many(field: str, noun: str, limit: int, count: int) -> ApiError:
    return invalid_anthropic_body(field, f"has {count} {noun}; the limit is {limit}")
