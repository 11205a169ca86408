"""Translates Messages API requests to chat requests and to `/tokenize` requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import orjson

from helexa.core.errors import ApiError, missing_model
from helexa.core.image_file import image_tokens
from helexa.cortex.anthropic.message_and_errors import invalid_anthropic_body, read_object, shown, to_json
from helexa.cortex.anthropic.messages_to_chat import chat_messages, check_bounds, string
from helexa.cortex.upstream.usage_meter import BYTES_PER_TOKEN

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_tools(tools: Any) -> list[dict[str, Any]]:
    """Convert Messages API tools to chat tools. Tools in OpenAI's format are copied.

    Raises:
        ApiError: 400 `invalid_anthropic_body`: a tool is malformed, or is one of Anthropic's built-in tools.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise invalid_anthropic_body("tools", "must be a list")
    return [_chat_tool(tool, f"tools.{index}") for index, tool in enumerate(tools)]


def _chat_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the chat request's fields for Anthropic's `tool_choice`.

    The fields are `tool_choice` and, if parallel calls are disabled, `parallel_tool_calls`. The result is empty
    without a choice, and without tools if the choice requires none.

    Raises:
        ApiError: 400 `invalid_anthropic_body`: the choice is malformed, or requires a tool that is not in `tools`.
    """
    if choice is None:
        return {}
    if not isinstance(choice, dict):
        raise invalid_anthropic_body("tool_choice", "must be an object")
    kind = choice.get("type")
    if kind == "tool":
        name = string(choice, "name", "tool_choice")
        if all(tool["function"].get("name") != name for tool in tools):
            raise invalid_anthropic_body(
                "tool_choice.name", f"must be the name of a tool in 'tools', not {shown(name)}"
            )
        tool_choice: Any = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        tool_choice = _CHOICES[kind]
    else:
        raise invalid_anthropic_body("tool_choice.type", f"must be 'auto', 'any', 'tool' or 'none', not {shown(kind)}")
    # Servers reject a tool choice without tools, so it is left out.
    if not tools:
        if kind == "any":
            raise invalid_anthropic_body(
                "tool_choice", "requires a tool, but 'tools' is empty; send a tool, or the type 'auto'"
            )
        return {}
    fields = {"tool_choice": tool_choice}
    return fields | {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") is True else fields


def _chat_tool(tool: Any, field: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise invalid_anthropic_body(field, "must be an object")
    kind = tool.get("type")
    if kind == "function" and isinstance(tool.get("function"), dict):
        return tool
    if kind not in (None, "custom"):
        raise invalid_anthropic_body(
            f"{field}.type",
            f"{str(kind)[:80]!r} is a tool of Anthropic's servers, which is not supported; "
            "define tools by 'name' and 'input_schema'",
        )
    return {"type": "function", "function": _function(tool, field)}


def _function(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": string(tool, "name", field)}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    schema = tool.get("input_schema")
    if schema is not None and not isinstance(schema, dict):
        raise invalid_anthropic_body(f"{field}.input_schema", "must be an object")
    function["parameters"] = schema or {"type": "object"}
    if tool.get("strict") is True:
        function["strict"] = True
    return function


_TRANSLATED = {
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format", "thread"),
    *("max_tokens", "stop_sequences", "stream", "metadata", "chat_template_kwargs"),
}

# Fields for accounting, caching and routing at Anthropic. They do not affect the response here, and are dropped.
_IGNORED = {
    *("service_tier", "context_management", "cache_control", "diagnostics", "inference_geo", "speed", "betas"),
    *("user_profile_id", "workspace_id", "billing_policy", "fallbacks", "fallback_credit_token", "anthropic_version"),
}
_NOT_FORWARDED = frozenset(_TRANSLATED | _IGNORED)

_MUST_BE_EMPTY = ("mcp_servers", "container", "compaction")

# Chat fields that the Messages API does not have, or has under another name.
_CHAT_ONLY_FIELDS = ("stop", "stream_options", "max_completion_tokens", "n")

_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a Messages API request to a chat request. Unknown fields are copied.

    Raises:
        ApiError: 400 `invalid_anthropic_body` or `missing_model_field`; 404 `thread_not_found`.
    """
    _check_thread(body.get("thread"))
    chat = {name: value for name, value in body.items() if name not in _NOT_FORWARDED}
    for name in _MUST_BE_EMPTY:
        if chat.pop(name, None):
            raise invalid_anthropic_body(name, "this field is not supported; leave the field out")
    for name in _CHAT_ONLY_FIELDS:
        if name in chat:
            raise invalid_anthropic_body(name, "is not a field of the Messages API; leave it out")
    chat |= to_prompt(body)
    chat["max_tokens"] = _max_tokens(body.get("max_tokens"))
    chat |= _chat_tool_choice(body.get("tool_choice"), chat.get("tools", []))
    if sequences := stop_sequences(body):
        chat["stop"] = sequences
    if user := _user_id(body.get("metadata")):
        chat["user"] = user
    chat |= _output_settings(body)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise invalid_anthropic_body("stream", "must be true or false")
    if stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def to_prompt(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate only the fields of a Messages API request that make the prompt.

    The result has the chat request's fields `model`, `messages`, `chat_template_kwargs` and, if not empty, `tools`.

    Raises:
        ApiError: 400 `invalid_anthropic_body` or `missing_model_field`.
    """
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise missing_model()
    check_bounds(body)
    messages = chat_messages(body.get("system"), body.get("messages"))
    prompt: dict[str, Any] = {"model": model, "messages": messages}
    if tools := chat_tools(body.get("tools")):
        prompt["tools"] = tools
    variables = _thinking(body.get("thinking"))
    if effort := _effort(body):
        variables["reasoning_effort"] = effort
    if _is_prefilled(messages):
        variables |= {"add_generation_prompt": False, "continue_final_message": True}
    template_kwargs = body.get("chat_template_kwargs")
    if template_kwargs is not None and not isinstance(template_kwargs, dict):
        raise invalid_anthropic_body("chat_template_kwargs", "must be an object")
    prompt["chat_template_kwargs"] = variables | (template_kwargs or {})
    return prompt


def stop_sequences(body: Mapping[str, Any]) -> list[str]:
    """Return the stop sequences of a Messages API request.

    Raises:
        ApiError: 400 `invalid_anthropic_body` if the value is not a list of non-empty strings.
    """
    sequences = body.get("stop_sequences") or []
    if not isinstance(sequences, list) or not all(isinstance(sequence, str) and sequence for sequence in sequences):
        raise invalid_anthropic_body("stop_sequences", "must be a list of non-empty strings")
    return sequences


def _check_thread(thread: Any) -> None:
    """Raise 404 for a continued stored conversation, or 400 for an invalid `thread`."""
    kind = thread.get("type") if isinstance(thread, dict) else None
    # The gateway stores no conversations. The tool runners of Anthropic's libraries react to this error and send the
    # whole conversation.
    if kind == "continue":
        raise ApiError(
            404,
            "thread_not_found",
            "thread: this gateway stores no conversations; send all messages of the conversation",
        )
    if thread is not None and kind != "create":
        raise invalid_anthropic_body("thread.type", f"must be 'create' or 'continue', not {shown(kind)}")


def _max_tokens(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise invalid_anthropic_body("max_tokens", "is required, and must be an integer of at least 1")
    return value


def _user_id(metadata: Any) -> str | None:
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return user if isinstance(user, str) else None


def _thinking(thinking: Any) -> dict[str, Any]:
    """Convert `thinking` to the chat template's variables for thinking."""
    # Thinking is off by default, as in Anthropic's own API. Without `enable_thinking`, many chat templates enable
    # thinking.
    if thinking is None:
        return {"enable_thinking": False}
    if not isinstance(thinking, dict):
        raise invalid_anthropic_body("thinking", "must be an object")
    if thinking.get("type") == "disabled":
        return {"enable_thinking": False}
    if thinking.get("type") not in ("enabled", "adaptive", "between_tools"):
        raise invalid_anthropic_body(
            "thinking.type", f"must be 'enabled', 'disabled' or 'adaptive', not {shown(thinking.get('type'))}"
        )
    budget = thinking.get("budget_tokens")
    # With `adaptive`, the model decides how much it thinks, so a budget is ignored. Some versions of Claude Code send
    # `adaptive` with a budget of 0.
    if budget is None or thinking["type"] == "adaptive":
        return {"enable_thinking": True}
    if type(budget) is not int or budget < 1:
        raise invalid_anthropic_body("thinking.budget_tokens", "must be an integer of at least 1")
    return {"enable_thinking": True, "thinking_budget": budget}


def _effort(body: Mapping[str, Any]) -> str | None:
    config = body.get("output_config")
    effort = config.get("effort") if isinstance(config, dict) else None
    thinking = body.get("thinking")
    # For its subagents, Claude Code disables thinking, but sends the effort of its main agent. Given both settings,
    # backends such as DeepSeek would think, or reject the request.
    if effort is None or (isinstance(thinking, dict) and thinking.get("type") == "disabled"):
        return None
    if not isinstance(effort, str) or effort not in _EFFORTS:
        raise invalid_anthropic_body(
            "output_config.effort", f"must be one of {', '.join(_EFFORTS)}, not {shown(effort)}"
        )
    return _EFFORTS[effort]


def _output_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `reasoning_effort` and `response_format` of the chat request."""
    settings: dict[str, Any] = {}
    if effort := _effort(body):
        settings["reasoning_effort"] = effort
    config = body.get("output_config")
    output_format = (config.get("format") if isinstance(config, dict) else None) or body.get("output_format")
    if output_format is not None:
        if (
            not isinstance(output_format, dict)
            or output_format.get("type") != "json_schema"
            or not isinstance(output_format.get("schema"), dict)
        ):
            raise invalid_anthropic_body("output_config.format", "must be {'type': 'json_schema', 'schema': an object}")
        schema = {"name": "answer", "schema": output_format["schema"], "strict": True}
        settings["response_format"] = {"type": "json_schema", "json_schema": schema}
    return settings


def _is_prefilled(messages: list[dict[str, Any]]) -> bool:
    """Return whether the model must continue the last message (Anthropic's prefill)."""
    message = messages[-1]
    return message["role"] == "assistant" and not message.get("tool_calls") and message["content"] not in ("", [])


_BYTES_PER_MESSAGE = 8


@dataclass(frozen=True)
class CountRequest:
    """A request of the Messages API to count the tokens of a prompt."""

    model: str  # model name in the client's request, possibly an alias
    body: bytes  # JSON body of the `POST /tokenize` request to a node. It contains the client's model name.
    estimate: int  # estimated number of prompt tokens. It is returned to the client if no node counts the tokens.

    def body_for(self, model: str) -> bytes:
        """Return the body of the request to a node, with `model` as the model's name."""
        model_member = _model_member(self.model)
        assert self.body.startswith(model_member)
        return _model_member(model) + self.body[len(model_member) :]

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Parse a `count_tokens` request, and translate it for `POST /tokenize` of a node.

        Raises:
            ApiError: 400 `malformed_json`, `missing_model_field` or `invalid_anthropic_body`.
        """
        request = read_object(body)
        prompt = to_prompt(request)
        choice = _chat_tool_choice(request.get("tool_choice"), prompt.get("tools", []))
        # For a chat request with this choice, a node leaves the tools out of the prompt, so they are not counted.
        if choice.get("tool_choice") == "none":
            prompt.pop("tools", None)
        variables = prompt["chat_template_kwargs"]
        template_flags = {
            "add_generation_prompt": variables.pop("add_generation_prompt", True),
            "continue_final_message": variables.pop("continue_final_message", False),
        }
        return cls(prompt["model"], to_json(prompt | template_flags), estimate_tokens(prompt))


def estimate_tokens(chat: Mapping[str, Any]) -> int:
    """Estimate the prompt tokens of a chat request from its length, at least 1."""
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
