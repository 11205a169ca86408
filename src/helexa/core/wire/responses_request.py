"""Request bodies of the Responses API, and their conversion to chat completions.

In the Responses API, function tools are flat objects, which may be grouped in namespaces. In chat completions, each
tool contains its function as a nested object.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StringConstraints
from pydantic_core import to_json

from helexa.core.errors import ApiError, invalid_body, unsupported_parameter
from helexa.core.wire.openai_chat import ChatRequest
from helexa.core.wire.request import GenerationRequest, WireObject
from helexa.core.wire.responses_input import TOOL_ITEMS, Item, chat_messages, input_items, name_in_chat

Tool = dict[str, Any]
Allowed = set[tuple[str | None, str]]  # namespaces and names of functions; None means any namespace

_FUNCTION = ("name", "description", "parameters", "strict")
# agents offer these tools by default and work without them
_IGNORED = frozenset({"web_search", "web_search_preview", "image_generation", "tool_search"})
TOOL_TYPES = frozenset({"function", "custom", "namespace", *_IGNORED})

# The parameters of a custom tool in a chat request. The only parameter is the input, which is any text. `hosted_call`
# converts earlier calls of custom tools to the same format.
_CUSTOM_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}

_UNSUPPORTED = ("background", "conversation", "context_management", "max_tool_calls", "moderation", "prompt")
_LIMITS = ("max_tokens", "max_completion_tokens")
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset(
    {
        _LOGPROBS,
        "reasoning.encrypted_content",  # reasoning is returned in plain text
        "code_interpreter_call.outputs",  # the outputs from here on never occur in responses of helexa
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_PARAM_NAMES = {  # names in the Responses API of parameters of chat completions
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
}

_PROMPT = (
    "Summarize this conversation for an assistant that will continue it and cannot see it. Keep every fact, name, "
    "number, decision, open question and unfinished task. Write only the summary."
)


def functions(tools: Sequence[Tool] | None) -> list[tuple[str | None, Tool]]:
    """Return the function and custom tools of a request, each after its namespace.

    The namespace is None for a tool outside of namespaces. Tools for web search, for images and for the search of tools
    are ignored.

    Raises:
        ApiError: 400 `unsupported_parameter`: a tool is neither a function nor a custom tool nor ignored. 400
            `invalid_request_body`: a tool is malformed.
    """
    return list(_functions(tools or (), "tools", None))


def _chat_names(tools: Sequence[Tool] | None) -> dict[tuple[str | None, str], str]:
    """Return the names that the chat request gives to a Responses request's functions.

    Chat requests have no namespaces, and clients name a namespace after each MCP server. A function whose name occurs
    several times gets its namespace as a prefix.

    Raises:
        ApiError: 400: a tool is malformed or not supported, or two functions have the same name.
    """
    pairs = [(namespace, function["name"]) for namespace, function in functions(tools)]
    counts = Counter(name for _, name in pairs)
    names: dict[tuple[str | None, str], str] = {}
    used = set[str]()
    for namespace, name in pairs:
        chat_name = name if namespace is None or counts[name] == 1 else f"{namespace.removesuffix('__')}__{name}"
        if chat_name in used:
            raise invalid_body(f"tools: two functions have the name {name[:80]!r}; rename one of them", "tools")
        used.add(chat_name)
        names[namespace, name] = chat_name
    return names


def _functions(tools: Sequence[Any], field: str, namespace: str | None) -> Iterable[tuple[str | None, Tool]]:
    for index, tool in enumerate(tools):
        path = f"{field}.{index}"
        match tool:
            case {"type": "function", "function": {"name": str()} as function}:  # the form of chat completions
                yield namespace, _normalized(function)
            case {"type": "function", "name": str()}:
                yield namespace, _normalized(tool)
            case {"type": "custom", "name": str()}:
                yield namespace, tool
            case {"type": "function"}:
                raise invalid_body(f"{path}.name: must be a string", f"{path}.name")
            case {"type": "namespace", "name": str(name), "tools": list(inner_tools)} if namespace is None:
                yield from _functions(inner_tools, f"{path}.tools", name)
            case {"type": str(kind)} if kind in _IGNORED:
                continue
            case {"type": str(kind)}:
                message = f"'{path}': tools of type {kind[:80]!r} are not supported; use type 'function'"
                raise unsupported_parameter("tools", message)
            case _:
                raise invalid_body(f"{path}: must be an object with a 'type'", path)


def _in_namespace(namespace: str | None, tool: Tool) -> Tool:
    return tool if namespace is None else {"type": "namespace", "name": namespace, "tools": [tool]}


def _normalized(function: Tool) -> Tool:
    return {"type": "function", **{key: function.get(key) for key in _FUNCTION}}


def chat_tools(tools: Sequence[Tool] | None, allowed: Allowed | None = None) -> list[Tool]:
    """Convert function and custom tools of a Responses API request to a chat's tools.

    If `allowed` is not None, return only these functions.

    Raises:
        ApiError: 400: a tool is malformed or not supported, or two functions have the same name.
    """
    names = _chat_names(tools)
    converted: list[Tool] = []
    for namespace, tool in functions(tools):
        name = tool["name"]
        if allowed is None or not allowed.isdisjoint({(namespace, name), (None, name)}):
            shown = tool if tool["type"] == "function" else _custom_function(tool)
            function = {key: shown[key] for key in _FUNCTION if shown.get(key) is not None}
            converted.append({"type": "function", "function": function | {"name": names[namespace, name]}})
    return converted


def _custom_function(tool: Tool) -> Tool:
    """Return a function that replaces a custom tool. Its only argument is a text."""
    texts = [tool.get("description")]
    match tool.get("format"):
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            texts.append(f"The input must match this {syntax} grammar:\n{definition}")
        case _:
            pass
    description = "\n\n".join([text for text in texts if isinstance(text, str) and text])
    return {"name": tool["name"], "description": description or None, "parameters": _CUSTOM_PARAMETERS}


def chat_choice(
    choice: str | dict[str, Any] | None, names: Mapping[tuple[str | None, str], str]
) -> tuple[str | dict[str, Any] | None, Allowed | None]:
    """Convert a Responses API request's `tool_choice` to a chat's `tool_choice`.

    `names` are the names of the functions in the chat, by namespace and name.

    Returns:
        The tool choice, and the functions that the model may call, or None if all are allowed.

    Raises:
        ApiError: 400: the choice is malformed (`invalid_request_body`) or not supported (`unsupported_parameter`).
    """
    if choice is None or isinstance(choice, str):
        return choice, None
    match choice:
        case {"type": "function" | "custom", "name": str(name)} | {"type": "function", "function": {"name": str(name)}}:
            return {"type": "function", "function": {"name": name_in_chat(names, choice.get("namespace"), name)}}, None
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            return mode, {
                (namespace, name)
                for tool in tools
                if isinstance(tool, dict)
                and isinstance(name := tool.get("name"), str)
                and isinstance(namespace := tool.get("namespace"), str | None)
            }
        case {"type": "function" | "allowed_tools"}:
            raise invalid_body("tool_choice: needs 'name', or 'mode' and a list of 'tools'", "tool_choice")
        case _:
            kind = repr(str(choice.get("type"))[:80])
            message = f"'tool_choice' of type {kind} is not supported; use 'function' or 'allowed_tools'"
            raise unsupported_parameter("tool_choice", message)


class TextConfig(WireObject):
    """The field `text` of a Responses API request: options of the text output.

    The type of `format` is `text`, `json_object` or `json_schema`.
    """

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(WireObject):
    """The field `reasoning` of a Responses API request: options of reasoning.

    Responses contain the complete reasoning in place of a summary.
    """

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class ResponsesRequest(GenerationRequest):
    """The body of `POST /v1/responses`.

    Undeclared parameters are handled as in a chat completion request.
    """

    input: Annotated[
        list[dict[str, Any]],
        PlainValidator(input_items, json_schema_input_type=str | Annotated[list[dict[str, Any]], Field(min_length=1)]),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    truncation: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(None, max_length=512)

    def reject_unsupported(self) -> None:
        """Raise ApiError 400 for a parameter that only OpenAI's servers support.

        The method `chat` checks all other parameters.
        """
        if self.n not in (None, 1):
            raise unsupported_parameter("n", f"'n' must be 1, not {self.n}, because a response has one answer")
        for name in _LIMITS:
            if getattr(self, name) is not None:
                raise unsupported_parameter(name, f"'{name}' is not supported here; use 'max_output_tokens'")
        for name in _UNSUPPORTED:
            self.reject(name)
        # `auto` is accepted, because some clients always send it. A conversation that is too long is an error in this
        # case, too, because helexa leaves no items out.
        if self.truncation not in (None, "auto", "disabled"):
            shown = str(self.truncation)[:80]
            raise unsupported_parameter("truncation", f"'truncation' must be 'auto' or 'disabled', not {shown!r}")
        for name in self.include or ():
            if name not in _INCLUDABLE:
                message = f"'include' of {name[:80]!r} is not supported; leave it out"
                raise unsupported_parameter("include", message)
        if self.reasoning is not None:
            for name, default in (("context", "auto"), ("mode", "standard")):
                if self.reasoning.extra(name) not in (None, default):
                    raise unsupported_parameter(f"reasoning.{name}")

    def chat(self, history: Sequence[Item] = ()) -> ChatRequest:
        """Return the equivalent chat request, which begins with the items of `history`.

        Raises:
            ApiError: 400: a field is invalid or not supported. The error uses the field names of the Responses API.
        """
        shared = {name: getattr(self, name) for name in GenerationRequest.model_fields}
        value = {name: field for name, field in shared.items() if field is not None}
        value |= self.model_extra or {}
        tools = self.offered
        names = _chat_names(tools)
        value["messages"] = chat_messages(self.instructions, [*history, *self.input], names, known=len(history))
        value["tool_choice"], allowed = chat_choice(self.tool_choice, names)
        value["max_completion_tokens"] = self.max_output_tokens
        value["parallel_tool_calls"] = self.parallel_tool_calls
        if converted := chat_tools(tools, allowed):
            value["tools"] = converted
        if self.text is not None and self.text.format is not None:
            value["response_format"] = _response_format(self.text.format)
        if self.reasoning is not None and self.reasoning.effort is not None:
            value["reasoning_effort"] = self.reasoning.effort
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            value |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        try:
            return ChatRequest.from_value(value)
        except ApiError as error:
            raise with_renamed_param(error) from None

    @property
    def offered(self) -> list[Tool]:
        """The tools in the field `tools`, and in input items that add tools.

        A later definition of a function in an item replaces an earlier one. A malformed tool may raise an `ApiError`,
        also in `namespaced` and `custom`.
        """
        later: dict[tuple[str | None, str], Tool] = {}
        for index, item in enumerate(self.input):
            if item.get("type") in TOOL_ITEMS:
                more = item.get("tools")
                if more is None and item["type"] == "tool_search_output":
                    continue  # helexa offers no search for tools, and does not check outputs of other servers' searches
                if not isinstance(more, list):
                    raise invalid_body(f"input.{index}.tools: must be a list", f"input.{index}.tools")
                later |= {(space, tool["name"]): tool for space, tool in functions(more)}
        if not later:
            return list(self.tools or ())
        first = [(space, later.pop((space, tool["name"]), tool)) for space, tool in functions(self.tools)]
        return [
            _in_namespace(space, tool) for space, tool in (*first, *((key[0], tool) for key, tool in later.items()))
        ]

    @property
    def namespaced(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of each function in a namespace, by its name in the chat."""
        return {
            chat_name: (namespace, name)
            for (namespace, name), chat_name in _chat_names(self.offered).items()
            if namespace is not None
        }

    @property
    def custom(self) -> frozenset[str]:
        """The names of the custom tools in the chat."""
        tools = self.offered
        if not any(tool["type"] == "custom" for _, tool in functions(tools)):
            return frozenset()
        names = _chat_names(tools)
        return frozenset(names[space, tool["name"]] for space, tool in functions(tools) if tool["type"] == "custom")

    def shown(self, *, store: bool, temperature: float, top_p: float) -> bytes:
        """Return the response fields that repeat the request's parameters, as JSON.

        `store`, `temperature` and `top_p` are the values that apply to the response.
        """
        effort, summary = (self.reasoning.effort, self.reasoning.summary) if self.reasoning else (None, None)
        shown = {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": effort, "summary": summary},
            "store": store,
            "temperature": temperature,
            "text": {"format": _complete_format((self.text and self.text.format) or {"type": "text"})},
            "tool_choice": self.tool_choice or "auto",
            "tools": [function for _, function in functions(self.tools)],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": top_p,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "max_tool_calls": None,
            "service_tier": "default",
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
            "truncation": "disabled",
            "user": self.user,
            "background": False,
        }
        # The sampling parameters are numbers even if the request does not set them, as the Open Responses specification
        # requires.
        return to_json(shown, inf_nan_mode="null")


def _complete_format(format: dict[str, Any]) -> dict[str, Any]:
    """Return the text format of a request with the keys that a response requires."""
    if format.get("type") != "json_schema":
        return format
    return {"description": None, **format, "strict": format.get("strict") is not False}


def _response_format(format: dict[str, Any]) -> dict[str, Any]:
    """Convert the field `text.format` to the `response_format` of a chat request."""
    match format.get("type"):
        case "text" | "json_object" as kind:
            return {"type": kind}
        case "json_schema":
            return {"type": "json_schema", "json_schema": {key: format[key] for key in format if key != "type"}}
        case _:
            raise invalid_body("text.format.type: must be 'text', 'json_object' or 'json_schema'", "text.format.type")


def with_renamed_param(error: ApiError) -> ApiError:
    """Return `error`, about a chat request, with parameter names of the Responses API."""
    param = error.param or ""
    for chat_name, responses_name in _PARAM_NAMES.items():
        if param == chat_name or param.startswith(f"{chat_name}."):
            text = re.sub(rf"(^|'){re.escape(chat_name)}\b", rf"\1{responses_name}", str(error))
            name = responses_name + param.removeprefix(chat_name)
            kind, retry = error.type, error.retry_after
            return ApiError(error.status, error.code, text, type=kind, param=name, retry_after=retry, **error.extras)
    return error


class CompactRequest(ResponsesRequest):
    """The body of `POST /v1/responses/compact`: a conversation to summarize.

    Tools in the body are ignored.
    """

    input: Annotated[
        list[dict[str, Any]],
        PlainValidator(
            lambda value: [] if value is None else input_items(value),
            json_schema_input_type=str | None | Annotated[list[dict[str, Any]], Field(min_length=1)],
        ),
    ] = Field(default_factory=list[dict[str, Any]])

    def chat(self, history: Sequence[Item] = ()) -> ChatRequest:
        """Return the chat request that lets the model summarize the conversation.

        The conversation consists of `history`, the items of earlier responses, and the items of `input`.

        Raises:
            ApiError: 400: the conversation is empty, or a field is invalid or not supported.
        """
        if not self.input and not history:
            raise invalid_body("input: must not be empty", "input")
        summary_prompt = {"type": "message", "role": "user", "content": _PROMPT}
        items = [item for item in self.input if item.get("type") not in TOOL_ITEMS]
        request = self.model_copy(update={"input": [*items, summary_prompt], "tools": None, "tool_choice": None})
        return ResponsesRequest.chat(request, history)
