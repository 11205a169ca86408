"""Request and response bodies of OpenAI's chat completions API."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, NotRequired, Self, TypedDict

import orjson
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from helexa.core.errors import ApiError, invalid_body, unsupported_parameter
from helexa.core.wire.chat_message import ChatMessage
from helexa.core.wire.request import MAX_ALTERNATIVES, GenerationRequest
from helexa.core.wire.usage_and_encoded_lists import Usage

_TEMPLATE_ARGUMENTS = ("messages", "tools")
_MAX_TOOLS = 512
_NO_PARAMETERS = {"type": "object", "properties": {}}


def both_endings() -> ApiError:
    """Return the error for `continue_final_message` with `add_generation_prompt`."""
    return invalid_body(
        "continue_final_message: cannot be true when 'add_generation_prompt' is; set one of them",
        "continue_final_message",
    )


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Check a tool of the type `function`, and return it."""
    # A tool of another type is returned without a check, because `reject_unsupported` rejects it later.
    if tool.get("type") != "function":
        return tool
    function = tool.get("function")
    if not isinstance(function, dict):
        raise PydanticCustomError("tool", "the 'function' of a tool must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise PydanticCustomError("tool", "the 'function.name' of a tool must be a string that is not empty")
    for field, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if not isinstance(function.get(field), kind | None):
            message = "the 'function.{field}' of a tool must be {kind} or null"
            expected = {str: "a string", dict: "an object", bool: "a boolean"}[kind]
            raise PydanticCustomError("tool", message, {"field": field, "kind": expected})
    return tool


Tools = Annotated[list[Annotated[dict[str, Any], AfterValidator(_tool)]], Field(max_length=_MAX_TOOLS)]


class ChatRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_ALTERNATIVES)
    enable_thinking: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_budget: int | None = Field(None, ge=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def has_image(self) -> bool:
        """Whether one of the messages contains an image."""
        return any(message.has_image for message in self.messages)

    @property
    def alternatives(self) -> int | None:
        """Number of likely tokens to report at each position; None for no logprobs."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools in the format that chat templates expect.

        Empty if `tool_choice` is `none`.
        """
        return [] if self.tool_choice == "none" else tools_for_template(self.tools or ())

    @property
    def forced_tool(self) -> str | None:
        """Name of the tool that `tool_choice` forces the model to call, or None."""
        choice = self.tool_choice
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else None

    @property
    def must_call(self) -> bool:
        """Whether `tool_choice` forces the model to call a tool."""
        return self.tool_choice == "required" or self.forced_tool is not None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template, without the field `enable_thinking`.

        Values in `chat_template_kwargs` override values of the request's other fields.
        """
        variables = {
            "reasoning_effort": self.reasoning_effort,
            "thinking_budget": self.thinking_budget,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        set_variables = {name: value for name, value in variables.items() if value is not None}
        return set_variables | (self.chat_template_kwargs or {})

    def thinks(self, default: bool | None) -> bool | None:
        """Return whether the request enables reasoning; `default` if it does not say."""
        enable_thinking = (self.chat_template_kwargs or {}).get("enable_thinking", self.enable_thinking)
        if isinstance(enable_thinking, bool):
            return enable_thinking
        if self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        return default if self.max_reasoning_tokens is None else True  # a limit makes sense only with reasoning

    @property
    def max_reasoning_tokens(self) -> int | None:
        """Maximum number of reasoning tokens, or None if the request states no limit."""
        # A template variable overrides the field. Not `isinstance`, which would accept `True` as an `int`.
        budget = (self.chat_template_kwargs or {}).get("thinking_budget")
        return budget if type(budget) is int and budget > 0 else self.thinking_budget

    def _validated(self) -> Self:
        self._apply_allowed_tools()  # before the checks, which expect `tool_choice` without `allowed_tools`
        return super()._validated()

    def _apply_allowed_tools(self) -> None:
        """Apply a `tool_choice` of the type `allowed_tools`: keep only these tools."""
        match self.tool_choice:
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed},
            }:
                names = {_function_name(tool) for tool in allowed}
                offered = {_function_name(tool) for tool in self.tools or ()}
                if missing := sorted(str(name) for name in names - offered):
                    raise invalid_body(
                        f"tool_choice: there is no tool {missing[0][:100]!r}; add it to tools", "tool_choice"
                    )
                self.tools = [tool for tool in self.tools or () if _function_name(tool) in names]
                self.tool_choice = mode
            case {"type": "allowed_tools"}:
                raise invalid_body("tool_choice: 'allowed_tools' needs 'mode' and a list of 'tools'", "tool_choice")
            case _:
                pass

    def reject_unsupported(self) -> None:
        """Reject unsupported tools and parameters, and the choice of an unknown tool."""
        super().reject_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise invalid_body(
                f"top_logprobs: is {self.top_logprobs}, but needs 'logprobs' to be true; send 'logprobs', too",
                "top_logprobs",
            )
        check_tools(self.tools or ())
        self._check_choice()
        variables = self.template_variables
        if variables.get("continue_final_message") and variables.get("add_generation_prompt"):
            raise both_endings()
        for name in ("functions", "audio", "web_search_options"):
            self.reject(name)
        self.reject("function_call", ("none", "auto"))
        self.reject("modalities", (["text"],))
        for name in _TEMPLATE_ARGUMENTS:
            if name in (self.chat_template_kwargs or {}):
                raise unsupported_parameter(
                    f"chat_template_kwargs.{name}",
                    f"'{name}' cannot be set through chat_template_kwargs; the request's own fields set it",
                )

    def _check_choice(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if choice != "required" and self.forced_tool is None:
            kind = choice.get("type") if isinstance(choice, dict) else choice
            message = f"'tool_choice' cannot be {str(kind)[:80]!r}; use none, auto, required or a function"
            raise unsupported_parameter("tool_choice", message)
        if not self.tools:
            raise invalid_body("tool_choice: asks for a call, but there are no tools; send 'tools'", "tool_choice")
        if self.forced_tool and self.forced_tool not in [tool["function"]["name"] for tool in self.tools]:
            message = f"tool_choice: there is no tool {self.forced_tool[:100]!r}; name a tool in 'tools'"
            raise invalid_body(message, "tool_choice")


def _function_name(tool: Any) -> str | None:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            return None


def tools_for_template(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return function tools without null fields of the functions, with `parameters`."""
    # Missing `parameters` are added, because chat templates expect them.
    return [_for_template(tool) for tool in tools]


def check_tools(tools: Iterable[dict[str, Any]]) -> None:
    """Raise an error for a tool of a chat request that is not a function."""
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            kind = str(tool.get("type"))[:80]
            raise unsupported_parameter("tools", f"'tools.{index}.type' must be 'function', not {kind!r}")


def _for_template(tool: dict[str, Any]) -> dict[str, Any]:
    function = {key: value for key, value in tool["function"].items() if value is not None}
    return {**tool, "function": function if "parameters" in function else {**function, "parameters": _NO_PARAMETERS}}


class CalledFunction(TypedDict):
    """In a chat response: the function of a tool call, with arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One tool call in the assistant's message of a chat response."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Alternative(TypedDict):
    """In a chat response: a token as text, its `bytes`, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Alternative):
    """In a chat response: a token, and the most likely tokens at its position."""

    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    """In a chat response: log-probabilities of the tokens, as a list of `ChatToken`."""

    content: orjson.Fragment
    refusal: None


class ChatAnswer(TypedDict):
    """The assistant's message in a chat response.

    `content` is null only if the message has tool calls and no text.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One completion of a non-streaming chat response."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: NotRequired[str]


class ChatCompletion(TypedDict):
    """The body of a non-streaming response to a chat request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(TypedDict, total=False):
    """In a streamed chat: the function of a tool-call delta, its name or arguments."""

    name: str
    arguments: str


class ToolCallDelta(TypedDict, total=False):
    """A delta of a tool call.

    Only the first delta of a call has `id`, `type` and the function's name.
    """

    index: int
    id: str
    type: Literal["function"]
    function: FunctionDelta


class ChatDelta(TypedDict, total=False):
    """A delta of the assistant's message in a chunk of a streamed chat."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    """One completion's part of a chunk of a streamed chat: delta, finish reason."""

    index: int
    delta: ChatDelta
    logprobs: NotRequired[ChatLogprobs]
    finish_reason: str | None
    stop_reason: NotRequired[str]


class ChatChunk(TypedDict):
    """One event (chunk) of a streaming response to a chat request.

    With `stream_options.include_usage`, the last event has `usage` and no choices, and in the events before it, `usage`
    is null.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
