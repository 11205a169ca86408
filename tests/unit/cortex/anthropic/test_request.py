"""Translation of Messages API requests into chat requests."""

from typing import Any

import pytest

from cortex.anthropic.claude_code import BASH, READ
from cortex.anthropic.request_builders import ASK, HI, PIXEL, assistant, chat, result, use, user
from helexa.core.errors import ApiError
from helexa.cortex.anthropic.message_and_errors import to_anthropic_error
from helexa.cortex.anthropic.request_settings_and_token_count import to_chat


def test_messages_request_is_translated_to_a_chat_request() -> None:
    assert to_chat(ASK) == {
        "model": "m",
        "max_tokens": 9,
        "messages": [HI],
        "chat_template_kwargs": {"enable_thinking": False},
    }


# Tools


def test_anthropic_tools_become_functions() -> None:
    plain, bare = {"type": "function", "function": {"name": "h"}}, {"name": "b"}
    assert chat(tools=[BASH, READ, plain, bare])["tools"] == [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["input_schema"],
            },
        }
        for tool in (BASH, READ)
    ] + [plain, {"type": "function", "function": {"name": "b", "parameters": {"type": "object"}}}]
    assert "tools" not in chat(tools=[]) and "tools" not in chat(tools=None)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "Bash"}, {"tool_choice": {"type": "function", "function": {"name": "Bash"}}}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (None, {}),
    ],
)
def test_anthropic_tool_choice_is_translated_to_openai_tool_choice(choice: Any, expected: dict[str, Any]) -> None:
    chat_request = chat(tools=[BASH], tool_choice=choice)
    assert {
        name: chat_request[name] for name in ("tool_choice", "parallel_tool_calls") if name in chat_request
    } == expected


def test_tool_choice_without_tools_is_omitted() -> None:
    assert "tool_choice" not in chat(tool_choice={"type": "auto"})


# Other parameters


def test_parameters_of_a_messages_request_are_translated() -> None:
    chat_request = chat(
        stream=True,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=7,
        stop_sequences=["END", "\n\nHuman:"],
        metadata={"user_id": "u1"},
        service_tier="auto",
        betas=["x"],
        mcp_servers=[],
        container=None,
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    assert {name: value for name, value in chat_request.items() if name not in ASK} == {
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "stop": ["END", "\n\nHuman:"],
        "user": "u1",
        "reasoning_effort": "high",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        },
        "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"},
    }


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, {"enable_thinking": False}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive", "display": "summarized"}, {"enable_thinking": True}),
        ({"type": "adaptive", "budget_tokens": 0}, {"enable_thinking": True}),  # Claude Code 2.1.252
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True, "thinking_budget": 1024}),
    ],
)
def test_field_thinking_becomes_chat_template_variables(thinking: Any, expected: dict[str, Any]) -> None:
    assert chat(thinking=thinking)["chat_template_kwargs"] == expected


def test_effort_is_not_sent_if_thinking_is_disabled() -> None:
    """Claude Code disables the thinking of its subagents, but sends the effort of its main agent."""
    effort = {"output_config": {"effort": "high"}}
    assert "reasoning_effort" not in chat(thinking={"type": "disabled"}, **effort)
    assert chat(thinking={"type": "adaptive"}, **effort)["reasoning_effort"] == "high"
    assert chat(**effort)["reasoning_effort"] == "high"


def test_chat_template_kwargs_of_a_messages_request_are_forwarded() -> None:
    variables = {"enable_thinking": True, "custom": 1}
    assert chat(chat_template_kwargs=variables)["chat_template_kwargs"] == variables


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["Hi"]}, "messages.0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [HI, {"role": "user", "content": 5}]}, "messages.1.content"),
    ({"messages": [user("x")]}, "messages.0.content.0"),
    ({"messages": [user({"type": "text"})]}, "messages.0.content.0.text"),
    ({"messages": [user(use("1", "f"))]}, "messages.0.content.0"),
    ({"messages": [assistant(result("1", "x"))]}, "messages.0.content.0"),
    ({"messages": [assistant({"type": "tool_use", "name": "f", "input": "{}"})]}, "messages.0.content.0.input"),
    ({"messages": [assistant({"type": "tool_use", "input": {}})]}, "messages.0.content.0.name"),
    ({"messages": [user(result("1", [{"type": "text"}]))]}, "messages.0.content.0.content.0.text"),
    ({"messages": [user({"type": "image"})]}, "messages.0.content.0.source"),
    ({"messages": [user({"type": "image", "source": {"type": "file"}})]}, "messages.0.content.0.source.type"),
    (
        {"messages": [user({"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}})]},
        "messages.0.content.0.source.url",
    ),
    (
        {"messages": [user({"type": "image", "source": {"type": "base64", "media_type": "a/b,c", "data": ""}})]},
        "messages.0.content.0.source.media_type",
    ),
    (
        {"messages": [user({"type": "document", "source": {"type": "base64", "data": "JVBERi0"}})]},
        "messages.0.content.0.source.type",
    ),
    ({"system": [PIXEL]}, "system.0"),
    ({"system": 5}, "system"),
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools.0"),
    ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
    ({"tools": [{"name": "f", "input_schema": "x"}]}, "tools.0.input_schema"),
    ({"tools": [BASH, {"type": "web_search_20250305", "name": "web_search"}]}, "tools.1.type"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": [BASH], "tool_choice": {"type": "tool", "name": "Rm"}}, "tool_choice.name"),
    ({"stop_sequences": "END"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": "on"}, "thinking"),
    ({"thinking": {"type": "some"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": "all"}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_format": {"type": "xml"}}, "output_config.format"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"stream": "yes"}, "stream"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"stop": ["x"]}, "stop"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("fields", "field"), WRONG)
def test_error_names_the_invalid_field_of_a_messages_request(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.code) == (400, "invalid_anthropic_body")
    assert refused.value.param == field
    assert str(refused.value).startswith(f"{field}: ")


def test_request_without_a_model_is_rejected() -> None:
    with pytest.raises(ApiError, match="model"):
        chat(model=None)


# Threads, which the tool runners of Anthropic's client libraries use


def test_field_thread_of_type_create_is_accepted() -> None:
    assert chat(thread={"type": "create"}) == chat(thread=None) == to_chat(ASK)


def test_field_thread_of_type_continue_is_404_thread_not_found() -> None:
    with pytest.raises(ApiError) as caught:
        to_chat({"thread": {"type": "continue", "previous_message_id": "msg_1"}, "messages": []})
    assert (caught.value.status, caught.value.code) == (404, "thread_not_found")
    error = to_anthropic_error(caught.value)["error"]
    assert (error["type"], error["details"]) == ("not_found_error", {"error_code": "thread_not_found"})


@pytest.mark.parametrize("thread", [{}, {"type": "fork"}, "create"])
def test_request_with_a_thread_of_an_unknown_type_is_rejected(thread: Any) -> None:
    with pytest.raises(ApiError) as caught:
        chat(thread=thread)
    assert caught.value.param == "thread.type"
