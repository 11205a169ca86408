"""Conversion of Responses requests to chat completion requests."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helexa.core.errors import ApiError
from helexa.core.wire.responses_output import ResponseOutput
from helexa.core.wire.responses_request import (
    CompactRequest,
    ResponsesRequest,
    chat_choice,
    chat_tools,
    with_renamed_param,
)

CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"x":1}', "status": None}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": None}

# Field names for random JSON, so that some of it resembles a request.
FIELD_NAMES = {
    "type",
    "role",
    "content",
    "text",
    "name",
    "arguments",
    "call_id",
    "output",
    "summary",
    "tools",
    "function",
} | {
    *("message", "user", "assistant", "system", "input_text", "input_image", "reasoning", "function_call", "namespace"),
    *("function_call_output", "allowed_tools", "mode", "auto", "format", "json_schema", "parameters", "effort", "low"),
}


def parse(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def message_item(text: str, role: str = "assistant") -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text, "annotations": []}]}


def reasoning_item(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


def messages_of(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [turn.for_template() for turn in parse(input=list(items), **fields).chat().messages]


def text_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def error_of(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields).chat()
    return caught.value


def test_input_that_is_a_string_becomes_a_user_message() -> None:
    assert [turn.for_template() for turn in parse().chat().messages] == [{"role": "user", "content": "hi"}]


def test_consecutive_assistant_items_of_a_response_input_become_one_message() -> None:
    second = CALL | {"call_id": "c2"}
    summary = [{"type": "summary_text", "text": "hm"}]
    conversation = [
        message_item("go", "user"),
        reasoning_item(summary=summary),
        message_item("I will"),
        CALL,
        second,
        RESULT,
        RESULT | {"call_id": "c2", "output": [{"type": "input_text", "text": "43"}]},
        message_item("done"),
    ]
    function = {"name": "f", "arguments": '{"x":1}'}
    calls = [{"id": id, "type": "function", "function": function} for id in ("c1", "c2")]
    assert messages_of(*conversation) == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I will", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": "43"},
        {"role": "assistant", "content": "done"},
    ]


def test_function_calls_without_text_become_an_assistant_message() -> None:
    user, assistant, result = messages_of(message_item("go", "user"), CALL, RESULT)
    assert assistant["content"] is None and len(assistant["tool_calls"]) == 1
    assert (user["role"], result["role"]) == ("user", "tool")


def test_function_call_without_id_or_with_an_object_as_arguments_is_accepted() -> None:
    call = {name: CALL[name] for name in ("type", "name")} | {"arguments": {"x": 1}}
    _, assistant, result = messages_of(message_item("go", "user"), call, RESULT | {"call_id": None})
    function = {"name": "f", "arguments": {"x": 1}}
    assert assistant["tool_calls"] == [{"type": "function", "function": function}]
    assert result == {"role": "tool", "content": "42"}


def test_text_after_a_function_call_joins_the_message_of_the_call() -> None:
    _, assistant, result, last = messages_of(
        message_item("go", "user"), CALL, message_item("I called"), RESULT, message_item("done")
    )
    assert (assistant["content"], len(assistant["tool_calls"])) == ("I called", 1)
    assert (result["role"], last["content"]) == ("tool", "done")
    _, first, second = messages_of(message_item("go", "user"), message_item("a"), message_item("b"))
    assert (first["content"], second["content"]) == ("a", "b")


@pytest.mark.parametrize(
    ("output", "read"), [({"a": [1, "ü"]}, '{"a":[1,"ü"]}'), (3, "3"), (False, "false"), ("x", "x"), (None, "")]
)
def test_function_output_that_is_no_text_is_converted_to_text(output: Any, read: str) -> None:
    assert messages_of(message_item("go", "user"), CALL, RESULT | {"output": output})[-1]["content"] == read


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"content": [{"type": "reasoning_text", "text": "all"}], "summary": [{"text": "less"}]}, "all"),
        ({"content": None, "summary": [{"text": "a"}, {"text": "b"}]}, "a\n\nb"),
        ({"encrypted_content": "gAAA"}, None),
    ],
)
def test_reasoning_text_or_its_summary_becomes_reasoning_content(fields: dict[str, Any], read: str | None) -> None:
    *_, assistant = messages_of(message_item("go", "user"), reasoning_item(**fields), message_item("so"))
    assert assistant.get("reasoning_content") == read


def test_reasoning_item_without_a_following_assistant_item_is_dropped() -> None:
    assert messages_of(reasoning_item(summary=[{"text": "hm"}]), message_item("go", "user"), message_item("so"))[
        1:
    ] == [{"role": "assistant", "content": "so"}]


@pytest.mark.parametrize(
    ("item", "name", "arguments"),
    [
        (
            {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin"},
            "apply_patch",
            {"input": "*** Begin"},
        ),
        ({"type": "local_shell_call", "action": {"command": ["ls"]}}, "local_shell", {"command": ["ls"]}),
        ({"type": "shell_call", "action": {"commands": ["ls"]}}, "shell", {"commands": ["ls"]}),
        ({"type": "apply_patch_call", "operation": {"path": "a"}}, "apply_patch", {"path": "a"}),
    ],
)
def test_calls_of_custom_or_built_in_tools_and_their_outputs_become_tool_messages(
    item: dict[str, Any], name: str, arguments: dict[str, Any]
) -> None:
    output = {"type": f"{item['type']}_output", "call_id": "c1", "output": "done"}
    call, result, _ = messages_of({**item, "call_id": "c1"}, output, message_item("Go on", "user"))
    assert call["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}]
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "c1", "done")


@pytest.mark.parametrize("outcome", [{"output": "3 files"}, {"error": "3 files"}])
def test_mcp_call_item_becomes_a_tool_call_and_its_result(outcome: dict[str, str]) -> None:
    item = {"type": "mcp_call", "id": "mcp_1", "name": "list", "server_label": "s", "arguments": '{"a": 1}', **outcome}
    call, result = messages_of(item)
    assert call["tool_calls"][0]["function"] == {"name": "list", "arguments": '{"a": 1}'}
    assert (result["tool_call_id"], result["content"]) == ("mcp_1", "3 files")


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "tool_search_call", "call_id": "c1", "arguments": {}},
        {"type": "tool_search_output", "call_id": "c1", "tools": []},
        {"type": "tool_search_output", "call_id": "c1", "output": "none"},
        {"type": "mcp_list_tools", "id": "mcpl_1", "tools": []},
        {"type": "image_generation_call", "id": "ig_1", "result": "AAAA"},
    ],
)
def test_input_item_without_content_for_the_model_is_dropped(item: dict[str, Any]) -> None:
    user, answer = message_item("Hi", "user"), message_item("Hello")
    assert messages_of(user, item, answer) == messages_of(user, answer)


def test_instructions_and_system_messages_are_merged_into_the_first_message() -> None:
    late = {"role": "system", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]}
    items = [{"role": "developer", "content": "b"}, message_item("go", "user"), late]
    assert messages_of(*items, instructions="a") == [
        {"role": "system", "content": "a\n\nb\n\nc\nd"},
        {"role": "user", "content": "go"},
    ]


def test_items_of_the_previous_response_follow_the_new_instructions() -> None:
    chat = parse(instructions="now").chat([message_item("one", "user"), message_item("two")])
    assert [(turn.role, turn.content) for turn in chat.messages] == [
        ("system", "now"),
        ("user", text_parts("one")),
        ("assistant", text_parts("two")),
        ("user", "hi"),
    ]


def test_input_messages_may_omit_type_and_content() -> None:
    assert messages_of({"role": "user", "content": "a"}, {"role": "assistant"}, {"role": "user", "content": "b"}) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
    ]


def test_parameters_of_a_responses_request_are_passed_to_the_chat_request() -> None:
    chat = parse(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        seed=1,
        stop="x",
        stream=True,
        user="u",
        logit_bias={5: 1},
    ).chat()
    assert (chat.output_limit, chat.temperature, chat.top_p, chat.top_k, chat.seed) == (7, 0.5, 0.9, 3, 1)
    assert (chat.stop, chat.stream, chat.user, chat.logit_bias) == (["x"], True, "u", {5: 1.0})


INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("detail", "chat_detail"),
    [({}, {}), ({"detail": "low"}, {"detail": "low"}), ({"detail": "original"}, {"detail": "high"})],
)
def test_input_image_becomes_an_image_part_of_the_message(detail: dict[str, str], chat_detail: dict[str, str]) -> None:
    for item in ({"role": "user"}, {"type": "function_call_output", "call_id": "c"}):
        content = "content" if "role" in item else "output"
        chat = parse(input=[item | {content: [INPUT_IMAGE | detail]}]).chat()
        assert chat.has_image
        image = {"url": INPUT_IMAGE["image_url"], **chat_detail}
        assert chat.messages[0].content == [{"type": "image_url", "image_url": image}]


@pytest.mark.parametrize(
    ("image", "code", "param"),
    [
        ({"type": "input_image", "file_id": "file-1"}, "unsupported_parameter", "input.0.content.0.file_id"),
        ({"type": "input_image"}, "invalid_request_body", "input.0.content.0.image_url"),
    ],
)
def test_input_image_needs_a_url(image: dict[str, str], code: str, param: str) -> None:
    error = error_of(input=[{"role": "user", "content": [image]}])
    assert (error.status, error.code, error.param) == (400, code, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"background": False, "conversation": None, "prompt": None, "context_management": []},
        {"include": ["reasoning.encrypted_content", "web_search_call.results"]},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"text": {"verbosity": "low"}},  # Codex sends it for names of OpenAI's models, and aliases have such names
        {"reasoning": {"effort": None, "summary": "auto", "context": "auto"}},
        {"truncation": "disabled", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "n": 1, "top_logprobs": 0},
        {"tools": [FUNCTION], "tool_choice": "none"},
        {"tools": [{"type": "web_search", "external_web_access": True}]},
        {"prompt_cache_key": "k", "safety_identifier": "s", "client_metadata": {}, "stream_options": None},
    ],
)
def test_unsupported_parameters_with_values_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    parse(**fields).chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"n": 2}, "n"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": ["secrets"]}, "include"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]}, "tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"type": "never_heard_of"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0"),
    ],
)
def test_unsupported_parameters_are_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    error = error_of(**fields)
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", param)
    assert f"'{param}" in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ["hi"]}, "input"),
        ({"input": [reasoning_item()]}, "input"),
        ({"input": [{}]}, "input.0"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [CALL | {"arguments": 7}]}, "input.0.arguments"),
        ({"input": [RESULT | {"call_id": 7}]}, "input.0.call_id"),
        ({"input": [reasoning_item(summary=["x"])]}, "input.0.summary"),
        ({"input": [{"role": "system", "content": [INPUT_IMAGE]}]}, "input.0.content"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{}]}]}, "tools.0.tools.0"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [FUNCTION, FUNCTION]}]}, "tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"reasoning": {"summary": "epic"}}, "reasoning.summary"),
    ],
)
def test_malformed_parameters_are_rejected_with_their_path(fields: dict[str, Any], param: str) -> None:
    error = error_of(**fields)
    assert (error.status, error.code, error.param) == (400, "invalid_request_body", param)


def test_index_in_an_error_counts_only_the_input_items_of_the_request() -> None:
    with pytest.raises(ApiError) as caught:
        parse(input=[{}]).chat([message_item("one", "user"), message_item("two")])
    assert caught.value.param == "input.0"


@pytest.mark.parametrize(
    ("chat_param", "responses_param"),
    [
        ("response_format", "text.format"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("messages.1.content", "input.1.content"),
        ("reasoning_effort", "reasoning.effort"),
        ("tools", "tools"),
        (None, None),
    ],
)
def test_errors_name_the_responses_parameter_instead_of_the_chat_parameter(
    chat_param: str | None, responses_param: str | None
) -> None:
    error = with_renamed_param(
        ApiError(503, "why", f"'{chat_param}' is not there", param=chat_param, retry_after=3, max=5)
    )
    assert (error.status, error.code, error.param, str(error)) == (
        503,
        "why",
        responses_param,
        f"'{responses_param}' is not there",
    )
    assert (error.retry_after, error.extras) == (3, {"max": 5})


def test_error_in_a_chat_request_made_from_a_responses_request_names_the_responses_field() -> None:
    error = error_of(response_format={"type": "xml"})
    assert error.param == "text.format"


def test_response_repeats_the_request_parameters() -> None:
    echoed = json.loads(
        parse(
            instructions="i",
            tools=[FUNCTION, {"type": "function", "function": {"name": "g"}}],
            tool_choice={"type": "function", "name": "f"},
            text={"format": {"type": "json_object"}},
            reasoning={"effort": "low"},
            parallel_tool_calls=False,
            metadata={"a": "b"},
        ).shown(store=False, temperature=0.7, top_p=1.0)
    )
    assert echoed["tools"] == [
        FUNCTION,
        {"type": "function", "name": "g", "description": None, "parameters": None, "strict": None},
    ]
    assert echoed["tool_choice"] == {"type": "function", "name": "f"}
    assert (echoed["instructions"], echoed["metadata"], echoed["store"]) == ("i", {"a": "b"}, False)
    assert (echoed["text"], echoed["reasoning"]) == (
        {"format": {"type": "json_object"}},
        {"effort": "low", "summary": None},
    )
    assert echoed["parallel_tool_calls"] is False


def test_functions_in_namespaces_become_a_flat_list() -> None:
    tools = [{"type": "namespace", "name": "agents", "tools": [FUNCTION]}, FUNCTION | {"name": "g"}]
    request = parse(tools=tools, tool_choice="none")
    names = [tool["function"]["name"] for tool in request.chat().tools or ()]
    assert names == ["f", "g"]
    assert request.namespaced == {"f": ("agents", "f")}


@pytest.mark.parametrize("content", ["Count.", [{"type": "input_text", "text": "Count."}, {"type": "x"}]])
def test_agent_message_item_becomes_a_user_message(content: Any) -> None:
    """Codex gives its subagents their task in such an item."""
    item = {"type": "agent_message", "id": "amsg_1", "author": "/root", "recipient": "/root/child", "content": content}
    (message,) = messages_of(item)
    assert message == {"role": "user", "content": "Message from /root to /root/child:\nCount."}
    with pytest.raises(ApiError, match=r"input\.0\.content: must contain text"):
        messages_of(item | {"content": [{"type": "encrypted_content"}]})


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
}


def test_custom_tool_becomes_a_function_with_one_text_parameter() -> None:
    """Codex has custom tools such as `apply_patch` and `exec`."""
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"}
    output = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    request = parse(tools=[PATCH, FUNCTION], input=[message_item("Hi", "user"), call, output])
    chat = request.chat()
    function = (chat.tools or [])[0]["function"]
    assert (function["name"], list(function["parameters"]["properties"])) == ("apply_patch", ["input"])
    assert function["description"] == "Change files.\n\nThe input must match this lark grammar:\nstart: LINE"
    assert (chat.messages[1].tool_calls or [])[0]["function"]["arguments"] == {"input": "*** Begin"}
    assert request.custom == {"apply_patch"}
    assert json.loads(request.shown(store=False, temperature=1, top_p=1))["tools"][0] == PATCH
    forced = parse(tools=[PATCH], tool_choice={"type": "custom", "name": "apply_patch"}).chat()
    assert forced.forced_tool == "apply_patch"
    spaces = [{"type": "namespace", "name": name, "tools": [PATCH]} for name in ("a", "b")]
    assert parse(tools=spaces).custom == {"a__apply_patch", "b__apply_patch"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (['{"inp', 'ut": "a\\nb"}'], "a\nb"),
        (["*** Begin\n", "x"], "*** Begin\nx"),
        (['"a"'], "a"),
        (['{"input": 3}'], '{"input": 3}'),
        ([], ""),
    ],
)
def test_custom_tool_call_in_the_output_has_its_input_text(arguments: list[str], text: str) -> None:
    output = ResponseOutput("s", {"a__exec": ("a", "exec")}, {"a__exec"})
    events = output.begin_call("c1", "a__exec")
    for part in arguments:
        events += output.add_arguments(part)
    events += output.end("completed")
    assert [event["type"] for event in events] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    added, item = events[0]["item"], events[-1]["item"]
    assert (added["type"], added["input"], item["input"]) == ("custom_tool_call", "", text)
    assert (item["call_id"], item["name"], item["namespace"], item["status"]) == ("c1", "exec", "a", "completed")
    assert "arguments" not in item


def test_tools_in_an_additional_tools_item_are_offered_to_the_model() -> None:
    """Codex sends all tools in such an item for some models."""
    spaces = [{"type": "namespace", "name": "agents", "tools": [FUNCTION]}, FUNCTION | {"name": "g"}]
    item = {"type": "additional_tools", "role": "developer", "tools": spaces}
    request = parse(input=[item, message_item("Hi", "user"), item], tools=[FUNCTION | {"name": "g"}])
    assert [tool["function"]["name"] for tool in request.chat().tools or ()] == ["g", "f"]
    assert [message.role for message in request.chat().messages] == ["user"]
    assert request.namespaced == {"f": ("agents", "f")}
    summary = CompactRequest.parse(json.dumps({"model": "m", "input": [item, message_item("Hi", "user")]}).encode())
    assert not summary.chat().tools
    changed = item | {"tools": [*spaces, FUNCTION | {"name": "g", "description": "New."}]}
    request = parse(input=[item, message_item("Hi", "user"), changed], tools=[FUNCTION | {"name": "g"}])
    names = [(tool["function"]["name"], tool["function"].get("description")) for tool in request.chat().tools or ()]
    assert [name for name, _ in names] == ["g", "f"]
    assert names[0][1] == "New."
    with pytest.raises(ApiError, match=r"input\.0\.tools: must be a list"):
        parse(input=[{"type": "additional_tools", "tools": "x"}, message_item("Hi", "user")]).chat()


def test_tool_search_tool_is_ignored_and_tools_in_its_output_are_offered() -> None:
    search = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {}}
    call = {"type": "tool_search_call", "call_id": "c1", "arguments": {"query": "mail"}}
    result = {"type": "tool_search_output", "call_id": "c1", "tools": [FUNCTION | {"name": "send"}]}
    request = parse(input=[message_item("Hi", "user"), call, result], tools=[search, FUNCTION])
    assert [tool["function"]["name"] for tool in request.chat().tools or ()] == ["f", "send"]


def test_functions_of_the_same_name_in_several_namespaces_get_distinct_names() -> None:
    """MCP servers often have tools of the same name, and clients group the tools of each server in a namespace."""
    tools = [
        *({"type": "namespace", "name": name, "tools": [FUNCTION]} for name in ("mcp__a__", "b")),
        FUNCTION,
        {"type": "namespace", "name": "c", "tools": [FUNCTION | {"name": "g"}]},
    ]
    calls = [CALL | {"call_id": space, "name": "f", "namespace": space} for space in ("mcp__a__", "b")]
    plain = CALL | {"call_id": "none", "name": "f"}
    choice = {"type": "function", "name": "f", "namespace": "b"}
    request = parse(tools=tools, input=[message_item("hi", "user"), *calls, plain], tool_choice=choice)
    chat = request.chat()
    names = ["mcp__a__f", "b__f", "f", "g"]
    assert [tool["function"]["name"] for tool in chat.tools or ()] == names
    assert [call["function"]["name"] for call in chat.messages[-1].tool_calls or ()] == names[:3]
    assert chat.forced_tool == "b__f"
    assert request.namespaced == {"mcp__a__f": ("mcp__a__", "f"), "b__f": ("b", "f"), "g": ("c", "g")}
    shown = json.loads(request.shown(store=False, temperature=0.7, top_p=1.0))["tools"]
    assert [tool["name"] for tool in shown] == ["f", "f", "f", "g"]


def test_tool_choice_allowed_tools_offers_only_the_allowed_functions() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    chosen, names = chat_choice(allowed, {})
    tools = [FUNCTION, FUNCTION | {"name": "g"}]
    assert (chosen, [tool["function"]["name"] for tool in chat_tools(tools, names)]) == ("auto", ["g"])


@pytest.mark.parametrize(("namespace", "offered"), [({"namespace": "b"}, ["b__f"]), ({}, ["a__f", "b__f"])])
def test_tool_choice_that_allows_a_namespace_offers_only_its_functions(
    namespace: dict[str, str], offered: list[str]
) -> None:
    tools = [{"type": "namespace", "name": name, "tools": [FUNCTION]} for name in ("a", "b")]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f", **namespace}]}
    chat = parse(tools=tools, tool_choice=allowed).chat()
    assert [tool["function"]["name"] for tool in chat.tools or ()] == offered


def test_response_repeats_integers_above_64_bits_of_the_request() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"maximum": 2**70}}
    assert json.loads(parse(tools=[tool]).shown(store=False, temperature=0.7, top_p=1.0))["tools"][0]["parameters"] == {
        "maximum": 2**70
    }


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(sorted(FIELD_NAMES)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted(FIELD_NAMES)) | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=12,
)
_FIELDS = ["input", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "instructions", "conversation"]


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4))
def test_responses_request_with_random_fields_is_accepted_or_rejected_with_400(fields: dict[str, Any]) -> None:
    try:
        request = parse(**fields)
        request.chat([message_item("one", "user")])
        json.loads(request.shown(store=True, temperature=0.7, top_p=1.0))
        assert isinstance(request.namespaced, dict)
    except ApiError as error:
        assert error.status == 400
        assert len(str(error)) < 1000
