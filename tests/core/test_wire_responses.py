"""What Responses ask for, as the chat completion that answers them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helexa.core.errors import ApiError
from helexa.core.wire.responses.request import ResponsesRequest, renamed
from helexa.core.wire.responses.tools import chat_choice, chat_tools

CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"x":1}', "status": None}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": None}

# What nonsense is made of, so that some of it means something.
WORDS = {
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


def asked(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def said(text: str, role: str = "assistant") -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text, "annotations": []}]}


def thought(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


def turns(*items: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return [turn.for_template() for turn in asked(input=list(items), **fields).chat().messages]


def text(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        asked(**fields).chat()
    return refused.value


def test_a_string_is_what_the_user_says() -> None:
    assert [turn.for_template() for turn in asked().chat().messages] == [{"role": "user", "content": "hi"}]


def test_a_turn_of_the_assistant_is_all_that_it_did_at_once() -> None:
    second = CALL | {"call_id": "c2"}
    summary = [{"type": "summary_text", "text": "hm"}]
    conversation = [
        said("go", "user"),
        thought(summary=summary),
        said("I will"),
        CALL,
        second,
        RESULT,
        RESULT | {"call_id": "c2", "output": [{"type": "input_text", "text": "43"}]},
        said("done"),
    ]
    function = {"name": "f", "arguments": '{"x":1}'}
    calls = [{"id": id, "type": "function", "function": function} for id in ("c1", "c2")]
    assert turns(*conversation) == [
        {"role": "user", "content": text("go")},
        {"role": "assistant", "content": text("I will"), "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": text("43")},
        {"role": "assistant", "content": text("done")},
    ]


def test_calls_without_words_are_a_turn_as_well() -> None:
    user, answer, result = turns(said("go", "user"), CALL, RESULT)
    assert answer["content"] is None and len(answer["tool_calls"]) == 1
    assert (user["role"], result["role"]) == ("user", "tool")


def test_words_after_a_call_are_of_its_turn() -> None:
    _, answer, result, last = turns(said("go", "user"), CALL, said("I called"), RESULT, said("done"))
    assert (answer["content"], len(answer["tool_calls"])) == (text("I called"), 1)
    assert (result["role"], last["content"]) == ("tool", text("done"))
    _, first, second = turns(said("go", "user"), said("a"), said("b"))
    assert (first["content"], second["content"]) == (text("a"), text("b"))


@pytest.mark.parametrize(
    ("output", "read"), [({"a": [1, "ü"]}, '{"a":[1,"ü"]}'), (3, "3"), (False, "false"), ("x", "x"), (None, "")]
)
def test_what_a_function_gave_back_is_text(output: Any, read: str) -> None:
    assert turns(said("go", "user"), CALL, RESULT | {"output": output})[-1]["content"] == read


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"content": [{"type": "reasoning_text", "text": "all"}], "summary": [{"text": "less"}]}, "all"),
        ({"content": None, "summary": [{"text": "a"}, {"text": "b"}]}, "a\n\nb"),
        ({"encrypted_content": "gAAA"}, None),
    ],
)
def test_reasoning_is_what_can_be_read_of_it(fields: dict[str, Any], read: str | None) -> None:
    *_, answer = turns(said("go", "user"), thought(**fields), said("so"))
    assert answer.get("reasoning_content") == read


def test_reasoning_that_nothing_came_of_is_left_out() -> None:
    assert turns(thought(summary=[{"text": "hm"}]), said("go", "user"), said("so"))[1:] == [
        {"role": "assistant", "content": text("so")}
    ]


def test_all_system_text_leads() -> None:
    late = {"role": "system", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]}
    items = [{"role": "developer", "content": "b"}, said("go", "user"), late]
    assert turns(*items, instructions="a") == [
        {"role": "system", "content": "a\n\nb\n\nc\nd"},
        {"role": "user", "content": text("go")},
    ]


def test_what_was_said_before_comes_first_but_for_its_instructions() -> None:
    chat = asked(instructions="now").chat([said("one", "user"), said("two")])
    assert [(turn.role, turn.content) for turn in chat.messages] == [
        ("system", "now"),
        ("user", text("one")),
        ("assistant", text("two")),
        ("user", "hi"),
    ]


def test_easy_messages_have_no_type_and_may_have_no_content() -> None:
    assert turns({"role": "user", "content": "a"}, {"role": "assistant"}, {"role": "user", "content": "b"}) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
    ]


def test_parameters_keep_their_meaning() -> None:
    chat = asked(
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


def test_an_image_is_one() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
    assert asked(input=[{"role": "user", "content": [image]}]).chat().has_image


@pytest.mark.parametrize(
    "fields",
    [
        {"background": False, "conversation": None, "prompt": None, "context_management": []},
        {"include": ["reasoning.encrypted_content", "web_search_call.results"]},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"reasoning": {"effort": None, "summary": "auto", "context": "auto"}},
        {"truncation": "disabled", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "n": 1, "top_logprobs": 0},
        {"tools": [FUNCTION], "tool_choice": "none"},
        {"tools": [{"type": "web_search", "external_web_access": True}]},
        {"prompt_cache_key": "k", "safety_identifier": "s", "client_metadata": {}, "stream_options": None},
    ],
)
def test_what_asks_for_nothing_special_is_fine(fields: dict[str, Any]) -> None:
    asked(**fields).chat()


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
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["secrets"]}, "include"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}]}, "tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"type": "computer_call"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0"),
    ],
)
def test_what_is_not_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", param)
    assert f"'{param}" in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ["hi"]}, "input"),
        ({"input": [thought()]}, "input"),
        ({"input": [{}]}, "input.0"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": ["x"]}]}, "input.0.content.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"input": [CALL | {"arguments": {}}]}, "input.0.arguments"),
        ({"input": [RESULT | {"call_id": None}]}, "input.0.call_id"),
        ({"input": [thought(summary=["x"])]}, "input.0.summary"),
        ({"input": [{"role": "system", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{}]}]}, "tools.0.tools.0"),
        ({"tools": [FUNCTION, {"type": "namespace", "name": "a", "tools": [FUNCTION]}]}, "tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"reasoning": {"summary": "epic"}}, "reasoning.summary"),
    ],
)
def test_what_is_malformed_is_refused_where_it_is(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.status, error.code, error.param) == (400, "invalid_request_body", param)


def test_places_count_from_the_requests_own_items() -> None:
    with pytest.raises(ApiError) as refused:
        asked(input=[{}]).chat([said("one", "user"), said("two")])
    assert refused.value.param == "input.0"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("response_format", "text.format"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("messages.1.content", "input.1.content"),
        ("reasoning_effort", "reasoning.effort"),
        ("tools", "tools"),
        (None, None),
    ],
)
def test_what_a_chat_completion_refuses_has_its_name_here(theirs: str | None, ours: str | None) -> None:
    error = renamed(ApiError(503, "why", f"'{theirs}' is not there", param=theirs, retry_after=3, max=5))
    assert (error.status, error.code, error.param, str(error)) == (503, "why", ours, f"'{ours}' is not there")
    assert (error.retry_after, error.extras) == (3, {"max": 5})


def test_a_refusal_of_the_chat_completion_is_one_here() -> None:
    error = refusal(response_format={"type": "xml"})
    assert error.param == "text.format"


def test_the_response_repeats_what_was_asked_for() -> None:
    shown = json.loads(
        asked(
            instructions="i",
            tools=[FUNCTION, {"type": "function", "function": {"name": "g"}}],
            tool_choice={"type": "function", "name": "f"},
            text={"format": {"type": "json_object"}},
            reasoning={"effort": "low"},
            parallel_tool_calls=False,
            metadata={"a": "b"},
        ).shown(store=False, temperature=0.7, top_p=1.0)
    )
    assert shown["tools"] == [
        FUNCTION,
        {"type": "function", "name": "g", "description": None, "parameters": None, "strict": None},
    ]
    assert shown["tool_choice"] == {"type": "function", "name": "f"}
    assert (shown["instructions"], shown["metadata"], shown["store"]) == ("i", {"a": "b"}, False)
    assert (shown["text"], shown["reasoning"]) == (
        {"format": {"type": "json_object"}},
        {"effort": "low", "summary": None},
    )
    assert shown["parallel_tool_calls"] is False


def test_functions_may_be_in_namespaces() -> None:
    tools = [{"type": "namespace", "name": "agents", "tools": [FUNCTION]}, FUNCTION | {"name": "g"}]
    request = asked(tools=tools, tool_choice="none")
    names = [tool["function"]["name"] for tool in request.chat().tools or ()]
    assert names == ["f", "g"]
    assert request.namespaces == {"f": "agents"}


def test_only_allowed_functions_are_on_offer() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    chosen, names = chat_choice(allowed)
    tools = [FUNCTION, FUNCTION | {"name": "g"}]
    assert (chosen, [tool["function"]["name"] for tool in chat_tools(tools, names)]) == ("auto", ["g"])


def test_numbers_that_few_can_write_are_repeated_all_the_same() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"maximum": 2**70}}
    assert json.loads(asked(tools=[tool]).shown(store=False, temperature=0.7, top_p=1.0))["tools"][0]["parameters"] == {
        "maximum": 2**70
    }


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(sorted(WORDS)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted(WORDS)) | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=12,
)
_FIELDS = ["input", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "instructions", "conversation"]


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4))
def test_nothing_but_a_refusal_comes_of_nonsense(fields: dict[str, Any]) -> None:
    try:
        request = asked(**fields)
        request.chat([said("one", "user")])
        json.loads(request.shown(store=True, temperature=0.7, top_p=1.0))
        assert isinstance(request.namespaces, dict)
    except ApiError as error:
        assert error.status == 400
        assert len(str(error)) < 1000
