"""Translates requests of Ollama's API to requests of OpenAI's."""

import base64
import binascii
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from helexa.core.errors import invalid_body, unsupported_parameter
from helexa.core.image_file import media_type
from helexa.cortex.forwarding.token_bounds import CHAT, COMPLETIONS, EMBEDDINGS
from helexa.cortex.ollama.requests import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    Message,
    Options,
    Tool,
)
from helexa.cortex.upstream.response_body import as_json, parse_arguments

Body = dict[str, Any]

_SAME_NAMES = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")
_USED_OPTIONS = frozenset({*_SAME_NAMES, "num_predict", "seed", "repeat_penalty"})
_OPTION_NAME = re.compile(r"[A-Za-z0-9_]{1,40}")
_MAX_NAMED_OPTIONS = 32
_IMAGE_START_CHARS = 24
_UNKNOWN_CALL = "call_unknown"


def chat_body(request: ChatRequest) -> Body:
    """Return the chat request for a request to `/api/chat` that has messages.

    Raises:
        ApiError: 400 because the arguments of a tool call are not a JSON object, or `format` is invalid.
    """
    body: Body = {"model": request.model, "messages": _messages(request.messages or ())}
    if request.tools:
        body["tools"] = [_tool(tool) for tool in request.tools]
    variables = _thinking(request)
    # As in Ollama, the model continues the text of an assistant message at the end of the conversation.
    last = body["messages"][-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        variables |= {"add_generation_prompt": False, "continue_final_message": True}
    return _with_settings(body, request, variables)


def _generate_body(request: GenerateRequest) -> Body:
    """Return the chat request for `/api/generate` without `raw` and `suffix`.

    Raises:
        ApiError: 400 because the request sets `template` or `context`, or `format` is invalid.
    """
    for name in ("template", "context"):
        if getattr(request, name):
            raise unsupported_parameter(name, f"'{name}' is not supported; send the conversation to /api/chat")
    user = Message(role="user", content=request.prompt, images=request.images)
    system = [Message(role="system", content=request.system)] if request.system else []
    body: Body = {"model": request.model, "messages": _messages([*system, user])}
    return _with_settings(body, request, _thinking(request))


def _text_body(request: GenerateRequest) -> Body:
    """Return the text completion request for `/api/generate` with `raw` or `suffix`.

    Raises:
        ApiError: 400 because the request also has images, or a field that only a chat template uses, or `format` is
            invalid.
    """
    for name in ("system", "template", "context", "images"):
        if getattr(request, name):
            message = f"'{name}' cannot be combined with '{'raw' if request.raw else 'suffix'}'; omit one of them"
            raise invalid_body(message, name)
    body: Body = {"model": request.model, "prompt": request.prompt}
    if request.suffix:
        body["suffix"] = request.suffix
    body = _with_settings(body, request, {})
    if body.pop("logprobs", False):
        body["logprobs"] = body.pop("top_logprobs", 0)
    return body


def _ignored_options(options: Options | None) -> list[str]:
    """Return the names of the options that have no effect, such as `num_ctx`."""
    names = () if options is None else sorted({*options.model_fields_set, *(options.model_extra or ())})
    return [name for name in names if name not in _USED_OPTIONS and _OPTION_NAME.fullmatch(name)][:_MAX_NAMED_OPTIONS]


def _with_settings(body: Body, request: ChatRequest | GenerateRequest, variables: Body) -> Body:
    """Add `variables` and the settings of an Ollama request to `body`, and return it."""
    if variables:
        body["chat_template_kwargs"] = variables
        if effort := variables.get("reasoning_effort"):
            body["reasoning_effort"] = effort
    body |= _sampling(request.options or Options())
    if request.format:
        body["response_format"] = _response_format(request.format)
    if request.logprobs:
        body["logprobs"] = True
        if request.top_logprobs:
            body["top_logprobs"] = request.top_logprobs
    if request.stream is not False:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def _sampling(options: Options) -> Body:
    fields = {name: value for name in _SAME_NAMES if (value := getattr(options, name)) is not None}
    if options.num_predict is not None and options.num_predict > 0:  # 0 and negative numbers set no limit
        fields["max_tokens"] = options.num_predict
    if options.seed is not None and options.seed >= 0:  # -1 means a random seed
        fields["seed"] = options.seed
    if options.repeat_penalty is not None and options.repeat_last_n != 0:
        fields["repetition_penalty"] = options.repeat_penalty
    return fields


def _response_format(value: dict[str, Any] | str) -> Body:
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, str):
        raise invalid_body("format: must be 'json' or a JSON Schema", "format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value, "strict": True}}


def _thinking(request: ChatRequest | GenerateRequest) -> Body:
    """Return the chat template's variables for thinking; empty if none are given."""
    if request.think is None:
        return {}
    if isinstance(request.think, bool):
        return {"enable_thinking": request.think}
    return {"enable_thinking": True, "reasoning_effort": "high" if request.think == "max" else request.think}


def _tool(tool: Tool) -> Body:
    return {"type": "function", "function": tool.function.model_dump(exclude_none=True)}


def _messages(messages: Sequence[Message]) -> list[Body]:
    ids = _CallIds()
    return [_message(message, ids, f"messages.{index}") for index, message in enumerate(messages)]


def _message(message: Message, ids: "_CallIds", field: str) -> Body:
    chat: Body = {"role": message.role, "content": message.content or ""}
    if message.images:
        text = [{"type": "text", "text": message.content}] if message.content else []
        chat["content"] = [*text, *({"type": "image_url", "image_url": {"url": _url(one)}} for one in message.images)]
    if message.role == "tool":
        name = message.tool_name or message.extra("name")
        name = name if isinstance(name, str) else ""
        chat["tool_call_id"] = ids.answered(message.tool_call_id, name)
        if name:
            chat["name"] = name
    if message.thinking and message.role == "assistant":
        chat["reasoning_content"] = message.thinking
    if message.tool_calls and message.role == "assistant":
        chat["tool_calls"] = [
            {"id": ids.new(call.id, call.function.name), "type": "function", "function": _called(call.function, place)}
            for place, call in ((f"{field}.tool_calls.{index}", one) for index, one in enumerate(message.tool_calls))
        ]
    return chat


def _called(function: Any, field: str) -> Body:
    arguments = function.arguments
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments)
        if arguments is None:
            raise invalid_body(f"{field}.function.arguments: must be an object", f"{field}.function.arguments")
    return {"name": function.name, "arguments": arguments or {}}


def _url(image: str) -> str:
    """Return the data URL of an image that is in base64 or already a data URL."""
    if image[:5].lower() == "data:":
        return image
    try:
        start = base64.b64decode(image[:_IMAGE_START_CHARS])
    except (binascii.Error, ValueError):
        start = b""
    return f"data:{media_type(start) or 'image/png'};base64,{image}"


class _CallIds:
    """Gives tool calls ids, and finds the call that a tool message answers.

    In Ollama's API, a tool message names the function that was called. In OpenAI's API, the
    tool message must contain the id of the call.
    """

    def __init__(self) -> None:
        self._count = 0
        self._open: OrderedDict[str, None] = OrderedDict()
        self._by_name: dict[str, deque[str]] = defaultdict(deque)

    def new(self, id: str | None, name: str) -> str:
        """Return the id of a tool call: `id`, or a new id if the client sent none."""
        self._count += 1
        id = id or f"call_{self._count}"
        self._open[id] = None
        self._by_name[name].append(id)
        return id

    def answered(self, id: str | None, name: str) -> str:
        """Return the id of the tool call that a tool message answers.

        If the message has no id, the result is the id of the oldest unanswered call of the function `name`. If there is
        no such call, the result is the id of the oldest unanswered call of any function, or else `_UNKNOWN_CALL`.
        """
        if id:
            self._open.pop(id, None)
            return id
        same = self._by_name[name]
        while same:
            if (candidate := same.popleft()) in self._open:
                del self._open[candidate]
                return candidate
        return self._open.popitem(last=False)[0] if self._open else _UNKNOWN_CALL


CHAT_API = "/api/chat"
GENERATE_API = "/api/generate"
EMBED_API = "/api/embed"
EMBEDDINGS_API = "/api/embeddings"
BLOBS = "/api/blobs/"  # beginning of the paths at which Ollama's clients upload files of models
_NAMES = ("chat", "generate", "embed", "embeddings", "tags", "ps", "show", "version")
_NAMES += ("pull", "push", "create", "copy", "delete")
_PATHS = frozenset({*(f"/api/{name}" for name in _NAMES), "/v1/systemone"})


@dataclass(frozen=True)
class Translation:
    """A request to Ollama's API, translated to a request to OpenAI's API."""

    api: str  # path of the client's request
    model: str  # model name in the client's request, possibly an alias
    path: str  # path of the request to a node
    body: bytes  # body of the request to a node. Empty if the client only loads or unloads the model.
    stream: bool = False  # True if the client requests a stream
    # Seconds without requests after which the model may be unloaded; a negative number means never. None if the request
    # does not set `keep_alive`.
    keep_alive: float | None = None
    dimensions: int | None = None  # number of dimensions to which embeddings are shortened; None to keep all
    ignored: list[str] = field(default_factory=list[str])  # names of the options that have no effect

    @property
    def unloads(self) -> bool:
        """True if the request only unloads the model."""
        return not self.body and self.keep_alive == 0

    @classmethod
    def parse(cls, api: str, body: bytes) -> "Translation":
        """Parse the body of a request to `api`, a path in `_PARSERS`, and translate it.

        Raises:
            ApiError: 400 because the body is not JSON (`malformed_json`), names no model (`missing_model_field`), or
                has an invalid (`invalid_request_body`) or unsupported (`unsupported_parameter`) field.
        """
        return _PARSERS[api](body)


def _chat(body: bytes) -> Translation:
    request = ChatRequest.parse(body)
    chat = as_json(chat_body(request)) if request.messages else b""
    return _generation(CHAT_API, request, CHAT, chat)


def _generate(body: bytes) -> Translation:
    request = GenerateRequest.parse(body)
    if not request.prompt:
        return _generation(GENERATE_API, request, CHAT, b"")
    if request.raw or request.suffix:
        return _generation(GENERATE_API, request, COMPLETIONS, as_json(_text_body(request)))
    return _generation(GENERATE_API, request, CHAT, as_json(_generate_body(request)))


def _generation(api: str, request: ChatRequest | GenerateRequest, path: str, body: bytes) -> Translation:
    return Translation(
        api,
        request.model,
        path,
        body,
        request.stream is not False,
        request.keep_alive,
        ignored=_ignored_options(request.options),
    )


def _embed(body: bytes) -> Translation:
    request = EmbedRequest.parse(body)
    texts: list[str] = [request.input] if isinstance(request.input, str) else request.input or []
    return _embedding(EMBED_API, request, [] if texts == [""] else texts, request.dimensions or None)


def _embeddings(body: bytes) -> Translation:
    request = EmbeddingsRequest.parse(body)
    return _embedding(EMBEDDINGS_API, request, [request.prompt] if request.prompt else [], None)


def _embedding(
    api: str, request: EmbedRequest | EmbeddingsRequest, texts: list[str], dimensions: int | None
) -> Translation:
    translated = {"model": request.model, "input": texts, "encoding_format": "float"}
    body = as_json(translated) if texts else b""
    return Translation(api, request.model, EMBEDDINGS, body, keep_alive=request.keep_alive, dimensions=dimensions)


_PARSERS: dict[str, Callable[[bytes], Translation]] = {
    CHAT_API: _chat,
    GENERATE_API: _generate,
    EMBED_API: _embed,
    EMBEDDINGS_API: _embeddings,
}


def is_ollama_path(path: str) -> bool:
    """Return whether a path belongs to Ollama's API; errors then have Ollama's format."""
    return path in _PATHS or path.startswith(BLOBS)
