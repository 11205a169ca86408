"""Chat requests in the forms that third-party backends accept.

The gateway translates requests of other APIs to chat requests for nodes of helexa: arguments of tool calls are objects,
tool messages may contain images, and variables of the chat template are in `chat_template_kwargs`.

"""

import re
from collections.abc import Callable, Collection
from hashlib import sha256
from typing import Any

import msgspec
import orjson

from helexa.core.errors import ApiError, unsupported_parameter
from helexa.core.wire.responses_request import TOOL_TYPES, ResponsesRequest, with_renamed_param

_ENDINGS = ("add_generation_prompt", "continue_final_message")
STREAM_OPTIONS = "stream_options"
# Sampling parameters of Anthropic's and Ollama's clients that OpenAI's API does not have.
_SAMPLING = ("top_k", "min_p", "repetition_penalty")
EFFORT = "reasoning_effort"
_DROPPED = ("chat_template_kwargs", *_ENDINGS, EFFORT, "parallel_tool_calls", STREAM_OPTIONS, "user")
_DROPPED += _SAMPLING
_DROPPED_IN_MESSAGES = ("reasoning_content",)
_DROPPED_IN_FUNCTIONS = ("strict",)
OUTPUT_LIMIT = "max_tokens"
_NEW_OUTPUT_LIMIT = "max_completion_tokens"

# Fields of translated requests that OpenAI's clients do not send, and that are omitted for a backend that refuses them.
OPTIONAL_FIELDS = (*_DROPPED, *_DROPPED_IN_MESSAGES, *_DROPPED_IN_FUNCTIONS, OUTPUT_LIMIT)

# Some servers require the parameters of a function, or their type, or properties of an object.
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

# An error that names a sampling parameter may be about its value. Only these words say that the parameter is unknown.
_UNKNOWN_FIELD = re.compile(
    rb"un(?:recogni[sz]ed|known|expected|supported)|not (?:supported|permitted|allowed|recogni[sz]ed|available)"
    rb"|extra[_ ](?:inputs|fields|forbidden)|additional propert|cannot find field",
    re.IGNORECASE,
)

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_IMAGES_FOLLOW = "Images in the results of the tools:"


def for_backend(body: bytes, refused: Collection[str], *, thinks_by_effort: bool = False) -> bytes:
    """Return a translated chat request in the form that third-party backends accept.

    * The arguments of tool calls become JSON text, and functions without parameters get an empty object of them.
    * Images in tool messages move to a user message after them, because OpenAI's API allows only text there.
    * The variables that end the prompt within the last assistant message move to the fields that vLLM and SGLang have.
    * If `thinks_by_effort`, disabled thinking becomes the reasoning effort `none`.

    Args:
        body: the request as JSON.
        refused: names in `OPTIONAL_FIELDS` that the backend refuses. These fields are left out. Without `max_tokens`,
            the limit is in `max_completion_tokens`.
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
    if OUTPUT_LIMIT in refused and OUTPUT_LIMIT in chat:
        chat[_NEW_OUTPUT_LIMIT] = chat.pop(OUTPUT_LIMIT)
    for name in _DROPPED:
        if name in refused:
            chat.pop(name, None)
    if thinks_by_effort and disables_thinking:
        chat[EFFORT] = "none"  # also for a model that has refused other efforts
    for tool in chat.get("tools", ()):
        function = tool["function"]
        if isinstance(parameters := function.get("parameters") or {}, dict):
            function["parameters"] = _NO_PARAMETERS | parameters
        for name in _DROPPED_IN_FUNCTIONS:
            if name in refused:
                function.pop(name, None)
    return orjson.dumps(chat)


def without_field(body: bytes, name: str) -> bytes:
    """Return the JSON object `body` without the field `name`; other bytes stay."""
    fields = _fields.decode(body)
    fields.pop(name, None)
    return msgspec.json.encode(fields)


def output_limit(body: bytes) -> int | None:
    """Return `max_tokens` of a chat request, or None if it has none."""
    fields = _fields.decode(body)
    limit = orjson.loads(memoryview(fields[OUTPUT_LIMIT])) if OUTPUT_LIMIT in fields else None
    return limit if type(limit) is int else None


def with_output_limit(body: bytes, limit: int) -> bytes:
    """Return a chat request with another `max_tokens`; other bytes stay."""
    return msgspec.json.encode(_fields.decode(body) | {OUTPUT_LIMIT: limit})


def changed_messages(body: bytes, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> bytes:
    """Return the chat request `body` with the messages that `change` returns.

    Other fields keep their bytes. A body without well-formed messages does not change.
    """
    fields = _fields.decode(body)
    messages = orjson.loads(memoryview(fields["messages"])) if "messages" in fields else None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return body
    return msgspec.json.encode(fields | {"messages": msgspec.Raw(orjson.dumps(change(messages)))})


def refused_fields(body: bytes, error: bytes) -> set[str]:
    """Return the optional fields of `body` that the error response `error` names."""
    # An error that names `max_tokens` alone is about its value. The field itself is refused only if the error names the
    # newer field, too: a backend that knows neither would otherwise generate without a limit.
    named = {
        name
        for name in OPTIONAL_FIELDS
        if f'"{name}":'.encode() in body and re.search(rb"(?<!\w)%b(?!\w)" % name.encode(), error)
    }
    if _UNKNOWN_FIELD.search(error) is None:
        named.difference_update(_SAMPLING)
    return named if _NEW_OUTPUT_LIMIT.encode() in error else named - {OUTPUT_LIMIT}


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
    """Return a user message with `images`, joined with `following` if a user message."""
    if not images:
        return []
    parts: list[dict[str, Any]] = [{"type": "text", "text": _IMAGES_FOLLOW}, *images]
    if following is None or following["role"] != "user":
        return [{"role": "user", "content": parts}, *([] if following is None else [following])]
    content = following["content"]
    return [
        {**following, "content": parts + ([{"type": "text", "text": content}] if isinstance(content, str) else content)}
    ]


_REFUSED_ORDER = re.compile(
    rb"\balternat(?:e|ing)\b|unexpected role|comes? immediately after"
    rb"|(?:successive|consecutive) (?:user|assistant|messages)",
    re.IGNORECASE,
)
_BETWEEN = "\n\n"


def refuses_order(error: bytes) -> bool:
    """Return whether an error response is about the order of the roles of messages."""
    return _REFUSED_ORDER.search(error) is not None


def with_alternating_roles(body: bytes) -> bytes:
    """Return a chat request in which user and assistant alternate. No text is lost.

    * Consecutive messages of the user become one message, and so do consecutive messages of the assistant.
    * The text of a message of the user that follows a tool result joins this result.
    """
    # Chat templates of Mistral's and Google's models, and APIs of some providers, reject two messages of one role in a
    # row. Mistral's also reject a message of the user after a tool result.
    return changed_messages(body, _alternating)


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for message in messages:
        before = turns[-1] if turns else {}
        roles = before.get("role"), message.get("role")
        is_same = roles in (("user", "user"), ("assistant", "assistant"))
        if is_same or (roles == ("tool", "user") and isinstance(message.get("content"), str)):
            turns[-1] = _merged(before, message)
        else:
            turns.append(message)
    return turns


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    merged = first | {"content": _joined(first.get("content"), second.get("content"))}
    for name in ("reasoning_content", "tool_calls"):
        if second.get(name):
            merged[name] = _joined(first.get(name), second[name])
    return merged


def _joined(first: Any, second: Any) -> Any:
    """Join two texts, or two lists of content parts. A text becomes a part if needed."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{_BETWEEN}{second}"
    return [part for content in (first, second) for part in _as_parts(content)]


def _as_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


# Errors of Mistral's templates, of OpenAI's API (at most 40 characters), and of Anthropic's and Amazon's (a pattern).
_REFUSED_IDS = re.compile(
    rb"tool[ _]calls?(?:\[\d+\]\.|[ _])ids?\b.{0,200}\b(?:length|9)\b|tool_?use[._]?id\b.{0,300}\bpattern\b",
    re.IGNORECASE | re.DOTALL,
)
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")


def refuses_thinking(error: bytes) -> bool:
    """Return whether an error response of Ollama says that a model has no such effort."""
    return re.search(rb"does not support thinking|\bthink value\b", error) is not None


def refuses_ids(error: bytes) -> bool:
    """Return whether an error response says that ids of tool calls are malformed."""
    return _REFUSED_IDS.search(error) is not None


def with_short_ids(body: bytes) -> bytes:
    """Return a chat request in which all ids of tool calls are 9 letters or digits.

    An id in this format stays.
    """
    # Mistral's templates accept only such ids. A new id depends only on the old one, so calls and results still match,
    # and later requests of the conversation have the same prefix.
    return changed_messages(body, lambda messages: [_shortened(message) for message in messages])


def _shortened(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(id := message.get("tool_call_id"), str):
        message = message | {"tool_call_id": _short(id)}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message = message | {"tool_calls": [_with_short_id(call) for call in calls]}
    return message


def _with_short_id(call: Any) -> Any:
    return call | {"id": _short(call["id"])} if isinstance(call, dict) and isinstance(call.get("id"), str) else call


def _short(id: str) -> str:
    return id if _SHORT_ID.fullmatch(id) else sha256(id.encode("utf-8", "replace")).hexdigest()[:9]


class _Tool(msgspec.Struct):
    type: Any = None


class _Offer(msgspec.Struct):
    tools: list[_Tool] | None = None
    previous_response_id: Any = None
    store: Any = None


_offer = msgspec.json.Decoder(_Offer)
_TOOL_TYPES = tuple(TOOL_TYPES)  # a type that the client sends may be unhashable


def offers_other_tools(body: bytes) -> bool:
    """Return whether a Responses request offers tools that are not functions.

    False for a request that needs stored responses or tools such as `file_search`, because no chat request can replace
    it.
    """
    try:
        offer = _offer.decode(body)
    except msgspec.DecodeError:
        return False
    is_stored = offer.previous_response_id is not None or offer.store is True
    types = [tool.type for tool in offer.tools or ()]
    return not is_stored and any(kind != "function" for kind in types) and all(kind in _TOOL_TYPES for kind in types)


# A refused value in a tool of a known type is the client's error. Most errors about a type name the type `function`.
_REFUSED_TYPE = re.compile(
    rb"[\"'`]function\b|\bonly\b.{0,20}\bfunction|\btool[ _]types?\b|\btools?(?:\[\d+\]|\.\d+)\.type\b"
    rb"|(?:unsupported|unknown|unrecogni[sz]ed) tools?\b|\btools?\b.{0,80}\b(?:un|not )support",
    re.IGNORECASE,
)


def refuses_tool_types(error: bytes) -> bool:
    """Return whether an error response refuses a type of tools."""
    return re.search(rb"\btools?\b", error) is not None and _REFUSED_TYPE.search(error) is not None


_PREVIOUS = "previous_response_id"


def read_responses_request(body: bytes) -> ResponsesRequest:
    """Parse a request of the Responses API that a chat completion will answer.

    Raises:
        ApiError: 400: a field is invalid, or needs stored responses, which such a backend does not have.
    """
    request = ResponsesRequest.parse(body)
    hint = "the model's server has only chat completions, which are not stored"
    if request.previous_response_id is not None:
        raise unsupported_parameter(_PREVIOUS, f"'{_PREVIOUS}' is not supported: {hint}; send the whole conversation")
    if request.store:
        raise unsupported_parameter("store", f"'store' must be false: {hint}; send store=false")
    return request


def chat_body(request: ResponsesRequest) -> bytes:
    """Return the body of the equivalent chat request, with token counts in its stream.

    Raises:
        ApiError: 400: a field is invalid or not supported. The error uses the field names of the Responses API.
    """
    try:
        chat = request.chat().model_dump(mode="json", exclude_none=True)
    except ApiError as error:
        raise with_renamed_param(error) from None
    limit = chat.pop("max_completion_tokens", None)  # many servers know only the older name
    if limit is not None:
        chat["max_tokens"] = limit
    for message in chat["messages"]:
        message.setdefault("content", None)
    if request.stream:
        chat["stream_options"] = {"include_usage": True}
    return _dumped(chat)


def _dumped(chat: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(chat)
    except orjson.JSONEncodeError as error:
        raise ApiError(400, "invalid_request_body", f"the request cannot be translated: {error}") from None
