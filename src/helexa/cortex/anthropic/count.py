"""Token counts for `POST /v1/messages/count_tokens`.

The count is exact if a node has the model loaded. Otherwise the count is an estimate. The endpoint never loads a model.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import orjson

from helexa.cortex.anthropic.requests.body import read_object, to_json
from helexa.cortex.anthropic.requests.to_chat import to_prompt
from helexa.cortex.usage.image_tokens import image_tokens
from helexa.cortex.usage.token_limit import BYTES_PER_TOKEN

TOKENIZE_PATH = "/tokenize"

_BYTES_PER_MESSAGE = 8

Ask = Callable[[bytes], Awaitable[tuple[int, bytes] | None]]
"""Posts a body to `TOKENIZE_PATH` of a node. Returns status and body of the response, or None if the call failed."""


@dataclass(frozen=True)
class CountRequest:
    """A request to count the tokens of a prompt.

    Attributes:
        model: model name in the client's request, possibly an alias.
        body: JSON body of the `POST /tokenize` request to a node. It contains the client's model name.
        estimate: estimated number of prompt tokens. It is returned to the client if no node counts the tokens.
    """

    model: str
    body: bytes
    estimate: int

    def body_for(self, model: str) -> bytes:
        """Return the body of the request to a node, with `model` instead of the client's model name."""
        model_member = _model_member(self.model)
        assert self.body.startswith(model_member)
        return _model_member(model) + self.body[len(model_member) :]

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse the body of `POST /v1/messages/count_tokens` and translate it to a body for `POST /tokenize` of a node.

        Raises:
            ApiError: 400 because the body is not JSON (`malformed_json`), names no model (`missing_model_field`), or
                has an invalid field (`invalid_anthropic_body`).
        """
        prompt = to_prompt(read_object(body))
        variables = prompt["chat_template_kwargs"]
        template_flags = {
            "add_generation_prompt": variables.pop("add_generation_prompt", True),
            "continue_final_message": variables.pop("continue_final_message", False),
        }
        return cls(prompt["model"], to_json(prompt | template_flags), estimate_tokens(prompt))


async def count_tokens(request: CountRequest, model: str, ask: Ask) -> bytes:
    """Let a node count the prompt tokens, and return the response body `{"input_tokens": N}`.

    N is the node's count. If no node counted the tokens, N is `request.estimate`.

    Args:
        request: the client's request.
        model: the model id, with aliases resolved.
        ask: function that posts a body to a node. It returns status and body of the response, or None if the call
            failed.
    """
    completion = await ask(request.body_for(model))
    count = None if completion is None else parse_count(*completion)
    return orjson.dumps({"input_tokens": request.estimate if count is None else count})


def parse_count(status: int, body: bytes) -> int | None:
    """Return the token count in a node's response to `POST /tokenize`, or None if the response has none."""
    if status != 200:
        return None
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    count = content.get("count") if isinstance(content, dict) else None
    return count if type(count) is int and count >= 0 else None


def estimate_tokens(chat: Mapping[str, Any]) -> int:
    """Estimate the number of prompt tokens of a chat request from its length. The result is at least 1."""
    size = sum(_BYTES_PER_MESSAGE + _size(message) for message in chat["messages"])
    if tools := chat.get("tools"):
        size += len(to_json({"tools": tools}))
    return max(size // BYTES_PER_TOKEN, 1)


def _model_member(model: str) -> bytes:
    return b'{"model":' + orjson.dumps(model)


def _size(message: Mapping[str, Any]) -> int:
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    size = sum(map(_block_size, blocks))
    if calls := message.get("tool_calls"):
        size += len(to_json({"calls": calls}))
    return size + len(message.get("reasoning_content", "").encode())


def _block_size(block: Mapping[str, Any]) -> int:
    if block["type"] == "text":
        return len(block["text"].encode())
    return BYTES_PER_TOKEN * image_tokens(block["image_url"]["url"])
