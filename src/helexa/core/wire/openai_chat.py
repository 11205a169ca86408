"""Request body of OpenAI's chat completions API."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from helexa.core.errors import ApiError, invalid_body, unsupported_parameter
from helexa.core.wire.chat_message import ChatMessage
from helexa.core.wire.generation import MAX_ALTERNATIVES, GenerationRequest

_TEMPLATE_ARGUMENTS = ("messages", "tools")
_MAX_TOOLS = 512
_NO_PARAMETERS = {"type": "object", "properties": {}}


def both_endings() -> ApiError:
    """Return the 400 error for a request that sets both `continue_final_message` and `add_generation_prompt`."""
    return invalid_body(
        "continue_final_message: cannot be true when 'add_generation_prompt' is; set one of them",
        "continue_final_message",
    )


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Check a tool of the type `function`, and return it.

    A tool of another type is returned without a check, because `reject_unsupported` rejects it later.
    """
    if tool.get("type") != "function":
        return tool
    function = tool.get("function")
    if not isinstance(function, dict):
        raise PydanticCustomError("tool", "'function' must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise PydanticCustomError("tool", "'function.name' must be a string that is not empty")
    for field, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if not isinstance(function.get(field), kind | None):
            raise PydanticCustomError("tool", "'function.{field}' is of the wrong type", {"field": field})
    return tool


Tool = Annotated[dict[str, Any], AfterValidator(_tool)]


class ChatRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS)] | None = None
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
        """Requested number of alternative tokens per output token, or None if no log-probabilities are requested."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools in the format that chat templates expect. Empty if `tool_choice` is `none`."""
        return [] if self.tool_choice == "none" else [_for_template(tool) for tool in self.tools or ()]

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
        """Variables for the chat template.

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
        """Return whether the request enables reasoning, or `default` if the request does not state it."""
        enable_thinking = (self.chat_template_kwargs or {}).get("enable_thinking", self.enable_thinking)
        if isinstance(enable_thinking, bool):
            return enable_thinking
        if self.reasoning_effort is not None:
            return self.reasoning_effort != "none"
        return default if self.max_reasoning_tokens is None else True

    @property
    def max_reasoning_tokens(self) -> int | None:
        """Maximum number of reasoning tokens, or None if the request states no limit."""
        budget = (self.chat_template_kwargs or {}).get("thinking_budget")
        return budget if type(budget) is int and budget > 0 else self.thinking_budget

    def reject_unsupported(self) -> None:
        """Raise an error for unsupported tools or parameters, or if `tool_choice` names an unknown tool."""
        super().reject_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise invalid_body("top_logprobs: needs 'logprobs' to be true", "top_logprobs")
        for index, tool in enumerate(self.tools or ()):
            if tool.get("type") != "function":
                raise unsupported_parameter("tools", f"'tools.{index}.type' must be 'function'")
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
                    f"chat_template_kwargs.{name}", f"'{name}' cannot be set through chat_template_kwargs"
                )

    def _check_choice(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return
        if choice != "required" and self.forced_tool is None:
            kind = choice.get("type") if isinstance(choice, dict) else choice
            raise unsupported_parameter("tool_choice", f"'tool_choice' cannot be {str(kind)[:80]!r}")
        if not self.tools:
            raise invalid_body("tool_choice: asks for a call, but there are no tools", "tool_choice")
        if self.forced_tool and self.forced_tool not in [tool["function"]["name"] for tool in self.tools]:
            raise invalid_body(f"tool_choice: there is no tool {self.forced_tool[:100]!r}", "tool_choice")


def _for_template(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the tool without null fields. Missing `parameters` are added, because chat templates expect them."""
    function = {key: value for key, value in tool["function"].items() if value is not None}
    return {**tool, "function": function if "parameters" in function else {**function, "parameters": _NO_PARAMETERS}}
