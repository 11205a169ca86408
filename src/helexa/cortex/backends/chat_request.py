"""Chat requests in the forms that third-party backends accept.

Chat requests that the gateway translated from other APIs are for helexa's own nodes: arguments of tool calls are
objects, tool messages may contain images, and variables of the chat template are in `chat_template_kwargs`.
`for_backend` converts these requests. The modules `refused_fields` and `refused_messages_and_calls` change what a
backend has refused.
"""

from collections.abc import Callable, Collection
from typing import Any

import msgspec
import orjson

from helexa.core.wire import BILLING_LINE
from helexa.core.wire.chat_message import without_billing_line
from helexa.cortex.backends.completion_choice import split_signature

_ENDINGS = ("add_generation_prompt", "continue_final_message")
STREAM_OPTIONS = "stream_options"
# Sampling parameters of Anthropic's and Ollama's clients. OpenAI's API does not have the first three, and its reasoning
# models do not accept the last two.
SAMPLING = ("top_k", "min_p", "repetition_penalty", "temperature", "top_p")
# Newer models of Anthropic accept either of these parameters, but not both.
TOGETHER = "temperature and top_p"
EFFORT = "reasoning_effort"
_DROPPED = ("chat_template_kwargs", *_ENDINGS, EFFORT, "parallel_tool_calls", STREAM_OPTIONS, "user")
_DROPPED += SAMPLING
_DROPPED_IN_MESSAGES = ("reasoning_content",)
_DROPPED_IN_FUNCTIONS = ("strict",)
EXTRA = "extra_content"  # field of a tool call, in which Google's API has the signature of the call
OUTPUT_LIMIT = "max_tokens"
NEW_OUTPUT_LIMIT = "max_completion_tokens"

# Fields of translated requests that OpenAI's clients do not send, and that are omitted for a backend that refuses them.
OPTIONAL_FIELDS = (*_DROPPED, *_DROPPED_IN_MESSAGES, *_DROPPED_IN_FUNCTIONS, EXTRA, OUTPUT_LIMIT, TOGETHER)

# Some servers require a function's field `parameters`, or the fields `type` and `properties` in it.
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_IMAGES_FOLLOW = "Images in the results of the tools:"


def for_backend(body: bytes, refused: Collection[str], *, thinks_by_effort: bool = False) -> bytes:
    """Return a translated chat request in a form that third-party backends accept.

    * The arguments of tool calls become JSON text, and functions without parameters get an empty schema.
    * A signature that the id of a tool call carries moves to `extra_content`.
    * Images in tool messages move to a user message after them, because OpenAI's API allows only text in tool messages.
    * Content that is a list of text parts becomes one string, which all servers accept.
    * Without tools, `tool_choice` is left out, because vLLM and OpenAI's API reject it.
    * The template variables `add_generation_prompt` and `continue_final_message` become fields, as in vLLM and SGLang.
    * If `thinks_by_effort`, disabled thinking becomes the reasoning effort `none`.

    Args:
        body: the request as JSON.
        refused: names in `OPTIONAL_FIELDS` that the backend refuses. These fields are left out. The value of a refused
            `max_tokens` moves to `max_completion_tokens`.
        thinks_by_effort: True for a server that ignores `chat_template_kwargs`, as Ollama does.
    """
    chat = orjson.loads(body)
    chat["messages"] = _messages(chat["messages"], refused)
    variables = chat.get("chat_template_kwargs")
    disables_thinking = isinstance(variables, dict) and variables.get("enable_thinking") is False
    if isinstance(variables, dict):
        chat |= {name: variables.pop(name) for name in _ENDINGS if name in variables}
        if not variables:
            del chat["chat_template_kwargs"]
    if not chat.get("tools"):
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            chat.pop(name, None)
    if OUTPUT_LIMIT in refused and OUTPUT_LIMIT in chat:
        chat[NEW_OUTPUT_LIMIT] = chat.pop(OUTPUT_LIMIT)
    for name in _DROPPED:
        if name in refused:
            chat.pop(name, None)
    if TOGETHER in refused and "temperature" in chat and "top_p" in chat:
        del chat["temperature" if chat["temperature"] == 1 else "top_p"]  # 1 is the default temperature of the models
    if thinks_by_effort and disables_thinking:
        # Set the field even if the loop above has removed it: the model refused only other values than `none`.
        chat[EFFORT] = "none"
    for tool in chat.get("tools", ()):
        function = tool["function"]
        if isinstance(parameters := function.get("parameters") or {}, dict):
            function["parameters"] = _NO_PARAMETERS | parameters
        for name in _DROPPED_IN_FUNCTIONS:
            if name in refused:
                function.pop(name, None)
    return orjson.dumps(chat)


def changed_messages(body: bytes, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> bytes:
    """Return the chat request `body` with the messages that `change` returns.

    Other fields keep their bytes. A body without well-formed messages does not change.
    """
    fields = _fields.decode(body)
    messages = orjson.loads(memoryview(fields["messages"])) if "messages" in fields else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return body
    return msgspec.json.encode(fields | {"messages": msgspec.Raw(orjson.dumps(change(messages)))})


_SYSTEM = ("system", "developer")
_BILLING_LINE = BILLING_LINE.encode()


def without_billing_lines(body: bytes) -> bytes:
    """Return a chat request without the billing line of Claude Code.

    Routers that translate Claude Code's requests leave this line in the system prompt.
    """
    if _BILLING_LINE not in body:
        return body
    return changed_messages(body, lambda messages: [_without_billing_line(message) for message in messages])


def _without_billing_line(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if message.get("role") not in _SYSTEM or not (isinstance(content, str) or _has_parts(content)):
        return message
    changed = without_billing_line(content)
    if isinstance(changed, list) and len(changed) > 1 and changed[0].get("text") == "":
        changed = changed[1:]  # many servers reject empty parts
    return message | {"content": changed}


def _has_parts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(part, dict) for part in content)


def _messages(messages: list[dict[str, Any]], refused: Collection[str]) -> list[dict[str, Any]]:
    converted: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    for message in messages:
        for name in _DROPPED_IN_MESSAGES:
            if name in refused:
                message.pop(name, None)
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if not isinstance(function["arguments"], str):
                function["arguments"] = orjson.dumps(function["arguments"]).decode()
            if "id" in call:
                call["id"], signature = split_signature(call["id"])
                if signature is not None and EXTRA not in refused:
                    call[EXTRA] = {"google": {"thought_signature": signature}}
        if "tool_call_id" in message:
            message["tool_call_id"], _ = split_signature(message["tool_call_id"])
        message = with_one_text(message)
        content = message.get("content")
        if message["role"] == "tool" and isinstance(content, list):
            images += [part for part in content if part["type"] != "text"]
            message["content"] = "\n".join([part["text"] for part in content if part["type"] == "text"])
        elif images and message["role"] != "tool":
            converted += _image_message(images, message)
            images = []
            continue
        converted.append(message)
    return converted + _image_message(images, None)


def _image_message(images: list[dict[str, Any]], following: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a user message with `images`, and then the message `following`.

    If `following` is also a user message, its content is appended to the message with the images. Without images, the
    result is empty.
    """
    if not images:
        return []
    parts: list[dict[str, Any]] = [{"type": "text", "text": _IMAGES_FOLLOW}, *images]
    if following is None or following["role"] != "user":
        return [{"role": "user", "content": parts}, *([] if following is None else [following])]
    content = following["content"]
    return [
        {**following, "content": parts + ([{"type": "text", "text": content}] if isinstance(content, str) else content)}
    ]


def with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message, its texts joined by line breaks if all its parts are texts."""
    content = message.get("content")
    if not _has_parts(content) or not content or not all(isinstance(part.get("text"), str) for part in content):
        return message
    return message | {"content": "\n".join([part["text"] for part in content])}
