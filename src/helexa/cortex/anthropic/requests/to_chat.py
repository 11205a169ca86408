"""Translates a request of the Messages API to a chat request."""

from collections.abc import Mapping
from typing import Any

from helexa.core.errors import ApiError, missing_model
from helexa.cortex.anthropic.errors import invalid_anthropic_body
from helexa.cortex.anthropic.requests.bounds import check_bounds
from helexa.cortex.anthropic.requests.conversation import chat_messages
from helexa.cortex.anthropic.requests.tools import chat_tool_choice, chat_tools

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
    """Translate the body of a Messages API request to the body of an OpenAI chat request. Unknown fields are copied.

    Raises:
        ApiError: 400 because a field is invalid (`invalid_anthropic_body`) or the model is missing
            (`missing_model_field`). 404 `thread_not_found` if the request continues a conversation that a server must
            store, because the gateway stores no conversations.
    """
    _check_thread(body.get("thread"))
    chat = {name: value for name, value in body.items() if name not in _NOT_FORWARDED}
    for name in _MUST_BE_EMPTY:
        if chat.pop(name, None):
            raise invalid_anthropic_body(name, "is not supported")
    for name in _CHAT_ONLY_FIELDS:
        if name in chat:
            raise invalid_anthropic_body(name, "is not a field of the Messages API")
    chat |= to_prompt(body)
    chat["max_tokens"] = _max_tokens(body.get("max_tokens"))
    chat |= chat_tool_choice(body.get("tool_choice"), chat.get("tools", []))
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
    """Translate only the fields that determine the prompt. This suffices to count the prompt's tokens.

    The result has the chat request's fields `model`, `messages`, `tools` and `chat_template_kwargs`.

    Raises:
        ApiError: 400 because a field is invalid (`invalid_anthropic_body`) or the model is missing
            (`missing_model_field`).
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
    """Return the stop sequences of a request: strings that end the response.

    Raises:
        ApiError: 400 `invalid_anthropic_body` if the value is not a list of non-empty strings.
    """
    sequences = body.get("stop_sequences") or []
    if not isinstance(sequences, list) or not all(isinstance(sequence, str) and sequence for sequence in sequences):
        raise invalid_anthropic_body("stop_sequences", "must be a list of non-empty strings")
    return sequences


def _check_thread(thread: Any) -> None:
    """Raise 404 `thread_not_found` if the request continues a thread: a conversation that the server stores.

    The gateway stores no conversations. The tool runners of Anthropic's libraries react to this error and send the
    whole conversation. A request that creates a thread is accepted.
    """
    kind = thread.get("type") if isinstance(thread, dict) else None
    if kind == "continue":
        raise ApiError(404, "thread_not_found", "thread: conversations are not stored; send all messages again")
    if thread is not None and kind != "create":
        raise invalid_anthropic_body("thread.type", "must be 'create' or 'continue'")


def _max_tokens(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise invalid_anthropic_body("max_tokens", "is required: an integer of at least 1")
    return value


def _user_id(metadata: Any) -> str | None:
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return user if isinstance(user, str) else None


def _thinking(thinking: Any) -> dict[str, Any]:
    """Convert the `thinking` field of a request to the chat template variables that enable, disable or limit thinking.

    If the request has no `thinking` field, thinking is disabled, as in Anthropic's own API.
    """
    if thinking is None:
        return {"enable_thinking": False}
    if not isinstance(thinking, dict):
        raise invalid_anthropic_body("thinking", "must be an object")
    if thinking.get("type") == "disabled":
        return {"enable_thinking": False}
    if thinking.get("type") not in ("enabled", "adaptive", "between_tools"):
        raise invalid_anthropic_body("thinking.type", "must be 'enabled', 'disabled' or 'adaptive'")
    budget = thinking.get("budget_tokens")
    if budget is None:
        return {"enable_thinking": True}
    if type(budget) is not int or budget < 1:
        raise invalid_anthropic_body("thinking.budget_tokens", "must be an integer of at least 1")
    return {"enable_thinking": True, "thinking_budget": budget}


def _effort(body: Mapping[str, Any]) -> str | None:
    config = body.get("output_config")
    effort = config.get("effort") if isinstance(config, dict) else None
    if effort is None:
        return None
    if not isinstance(effort, str) or effort not in _EFFORTS:
        raise invalid_anthropic_body("output_config.effort", f"must be one of {', '.join(_EFFORTS)}")
    return _EFFORTS[effort]


def _output_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request fields `reasoning_effort` and `response_format`, if the client set them."""
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
    """Return whether the last message is assistant text that the model must continue ("prefill" in Anthropic's API)."""
    message = messages[-1]
    return message["role"] == "assistant" and not message.get("tool_calls") and message["content"] not in ("", [])
