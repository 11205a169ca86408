import json
from typing import Any

import pytest
from openai.types import CompletionUsage
from openai.types import Model as OpenAIModel

from helexa.core.errors import ApiError
from helexa.core.node_reports import Limit, ModelInfo
from helexa.core.wire.openai_chat import ChatRequest
from helexa.core.wire.openai_completions import CompletionRequest
from helexa.core.wire.request import MAX_LOGPROBS
from helexa.core.wire.responses_request import ResponsesRequest
from helexa.core.wire.usage_and_encoded_lists import usage
from helexa.neuron.routes.health_and_model_list import model_entry, model_list

USER = {"role": "user", "content": "hi"}
UNSUPPORTED: dict[str, object] = {
    "min_tokens": 5,
    "stop_token_ids": [2],
    "bad_words": ["x"],
    "allowed_token_ids": [1, 2],
    "include_stop_str_in_output": True,
    "prompt_logprobs": 0,
    "use_beam_search": True,
    "chat_template": "{{ messages }}",
    "verbosity": "low",
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 5,
    "logits_processors": ["x"],
    "grammar": 'root ::= "x"',
    "ebnf": 'root ::= "x"',
}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.parse(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (rb"\ud83d", "\ufffd"),
        (rb"\uDE00\uD83D\uDE00", "\ufffd\U0001f600"),
        (rb"\\ud83d", r"\ud83d"),
        (rb"\\\ud83d.", "\\\ufffd."),
    ],
)
def test_half_of_a_surrogate_pair_is_read_as_a_replacement_character(escaped: bytes, text: str) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % escaped
    assert ChatRequest.parse(body).messages[0].content == text


def template_messages(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [message.for_template() for message in chat(messages=list(messages)).messages]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_anthropic_billing_line_is_removed_from_system_messages(role: str) -> None:
    line, text = "x-anthropic-billing-header: cc_version=2.1; cch=%s;", "You are a helper."
    spellings: list[Any] = [
        f"{line % 'a'}\n\n{text}",
        f"{line % 'b'}\n{text}",
        [{"type": "text", "text": line % "c"}, {"type": "text", "text": text}],
        [{"type": "text", "text": f"{line % 'd'}\n{text}"}],
    ]
    messages = [{"role": role, "content": content} for content in spellings]
    assert template_messages(*messages) == [{"role": role, "content": text}] * len(spellings)
    kept = [{"role": "user", "content": spellings[0]}, {"role": role, "content": f"Never print {line}"}]
    assert template_messages(*kept) == kept


def test_messages_given_to_the_chat_template_omit_null_fields() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "vendor": [1]}
    plain_call = {name: call[name] for name in ("id", "type", "function")}
    replayed = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [call],
        "reasoning_content": "hm",
    }
    tool_result = {"role": "tool", "tool_call_id": "call_1", "content": "42", "name": "f"}
    assert template_messages(USER, replayed, tool_result) == [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [plain_call], "reasoning_content": "hm"},
        tool_result,
    ]


@pytest.mark.parametrize(
    "calls",
    ["x", [1], [{}], [{"function": 2}], [{"function": {"name": ""}}], [{"type": "custom", "custom": {"name": "f"}}]],
)
def test_malformed_tool_calls_are_rejected(calls: object) -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[USER, {"role": "assistant", "tool_calls": calls}])
    assert (caught.value.status, caught.value.param) == (400, "messages.1.tool_calls")


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "Hi", "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}]},
        {"content": "Hi", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "Hi"}]},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                {"type": "text", "text": "Hi"},
            ]
        },
        {"content": "Hi", "reasoning_content": "hm", "thinking_blocks": [{"type": "redacted_thinking", "data": "x"}]},
    ],
)
def test_signed_reasoning_of_other_servers_becomes_reasoning_content(fields: dict[str, Any]) -> None:
    _, message = template_messages(USER, {"role": "assistant", **fields})
    assert message == {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}


def test_former_field_function_call_becomes_a_tool_call() -> None:
    call = {"name": "f", "arguments": "{}"}
    (message,) = template_messages({"role": "assistant", "content": None, "function_call": call})
    assert message["tool_calls"] == [{"type": "function", "function": call}]


def test_message_content_of_a_chat_may_be_missing_or_a_list_of_parts() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "refusal", "refusal": "b"}]
    assert template_messages({"role": "assistant"}, {"role": "user", "content": parts}) == [
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image"])
def test_images_in_a_chat_request_are_detected(kind: str) -> None:
    assert chat(messages=[USER, {"role": "user", "content": [{"type": kind}]}]).has_image
    assert not chat().has_image


def test_unknown_fields_of_a_chat_request_are_accepted() -> None:
    request = chat(metadata={"a": "b"}, store=False, service_tier="auto", top_a=0.1, parallel_tool_calls=True)
    assert request.extra("metadata") == {"a": "b"}
    assert request.extra("absent") is None


def test_max_completion_tokens_overrides_max_tokens() -> None:
    assert chat(max_tokens=5, max_completion_tokens=3).output_limit == 3
    assert chat(max_tokens=5).output_limit == 5
    assert chat().output_limit is None


def test_output_limit_of_minus_one_means_no_limit() -> None:
    assert chat(max_tokens=-1).output_limit is None
    # The gateway adds its limit to a request without one as `max_tokens`.
    assert chat(max_tokens=5, max_completion_tokens=-1).output_limit == 5


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_output_limit_below_one_is_rejected(name: str) -> None:
    for value in (0, -2):
        with pytest.raises(ApiError, match=f"{name}: must be at least 1, or -1 for no limit") as caught:
            chat(**{name: value})
        assert caught.value.param == name
    completion: dict[str, Any] = {"model": "m", "prompt": "x"}
    assert CompletionRequest.from_value(completion | {"max_tokens": 0}).output_limit == 0
    with pytest.raises(ApiError, match="max_tokens: must be at least 0, or -1 for no limit"):
        CompletionRequest.from_value(completion | {"max_tokens": -2})


@pytest.mark.parametrize(("stop", "read"), [(None, None), ("a", ["a"]), (["a", "b"], ["a", "b"]), ([], [])])
def test_stop_strings_given_as_string_or_list_are_read_as_a_list(stop: object, read: list[str] | None) -> None:
    assert chat(stop=stop).stop == read


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"tool_choice": "auto"},
        {"n": 1},
        {"logprobs": False, "top_logprobs": 0},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"audio": None, "functions": [], "function_call": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"min_tokens": 0, "stop_token_ids": [], "bad_words": [], "allowed_token_ids": None, "chat_template": None},
        {"grammar": "", "ebnf": None, "json_schema": None, "regex": ""},
        {"include_stop_str_in_output": False, "prompt_logprobs": None, "use_beam_search": False},
        {"verbosity": "medium", "prediction": None, "skip_special_tokens": True},
        {"prediction": {"type": "content", "content": "a guess only makes the answer faster"}},
        {"top_p": 0},
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "stream_options": {}},
        {"tools": [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}]},
    ],
)
def test_unsupported_parameters_with_values_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    chat(**fields)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"web_search_options": {"a": 1}}, "web_search_options"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        *(({name: value}, name) for name, value in UNSUPPORTED.items()),
    ],
)
def test_unsupported_parameters_are_rejected_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ApiError, match=f"'{name}'") as caught:
        chat(**fields)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items())
def test_completions_and_responses_reject_unsupported_parameters_by_name(name: str, value: object) -> None:
    with pytest.raises(ApiError, match=f"'{name}'"):
        CompletionRequest.parse(json.dumps({"model": "m", "prompt": "x", name: value}).encode())
    with pytest.raises(ApiError, match=f"'{name}'"):
        ResponsesRequest.parse(json.dumps({"model": "m", "input": "x", name: value}).encode()).chat()


def test_field_continue_final_message_becomes_a_template_variable() -> None:
    variables = chat(continue_final_message=True, add_generation_prompt=False).template_variables
    assert variables == {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    "fields",
    [
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": True, "chat_template_kwargs": {"add_generation_prompt": True}},
    ],
)
def test_continue_final_message_with_add_generation_prompt_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="set one of them") as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, "continue_final_message")


def test_request_for_too_many_log_probabilities_in_total_is_rejected() -> None:
    logprob_fields = {"logprobs": True, "top_logprobs": 20, "max_tokens": 9000}
    assert chat(**logprob_fields).limited_by_logprobs(9, 8192) == 8192
    assert chat(n=16).limited_by_logprobs(9, 8192) == 8192
    assert chat(**logprob_fields, n=16).limited_by_logprobs(9, 1024) == 1024
    with pytest.raises(ApiError, match=r"'logprobs' of 16 x 8192 tokens with 20 alternatives") as caught:
        chat(**logprob_fields, n=16).limited_by_logprobs(9, 8192)
    assert (caught.value.status, caught.value.code) == (400, "unsupported_parameter")


def test_answer_without_max_tokens_is_limited_by_the_number_of_requested_log_probabilities() -> None:
    longest = chat(logprobs=True, top_logprobs=20).limited_by_logprobs(9, 131_072)
    assert longest == MAX_LOGPROBS // 21
    assert chat(logprobs=True, top_logprobs=20, max_tokens=longest).limited_by_logprobs(9, longest) == longest


def test_validation_error_names_the_field() -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[USER, {"role": "user", "content": {}}])
    assert caught.value.param == "messages.1.content"
    assert str(caught.value) == "messages.1.content: the content of a message must be a string, a list of parts or null"


def test_error_about_an_overlong_field_name_shortens_the_name() -> None:
    with pytest.raises(ApiError) as caught:
        chat(logit_bias={"x" * 100_000: 1})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("body", [b"", b"{", b"{}x", b"\xff", b"[" * 10_000])
def test_request_body_that_is_not_json_is_rejected(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        ChatRequest.parse(body)
    assert (caught.value.status, caught.value.code) == (400, "malformed_json")


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("a", ["a"]), (["a"], ["a"]), ([1, 2], [[1, 2]]), ([[1, 2]], [[1, 2]]), (["a", [0]], ["a", [0]])],
)
def test_prompt_of_a_completion_may_be_text_or_token_ids(prompt: object, read: object) -> None:
    request = CompletionRequest.parse(json.dumps({"model": "m", "prompt": prompt}).encode())
    assert request.prompt == read
    request.check_vocabulary(3)


def test_prompt_token_ids_outside_the_vocabulary_are_rejected() -> None:
    request = CompletionRequest.parse(b'{"model":"m","prompt":[1,2],"logit_bias":{"1":1}}')
    with pytest.raises(ApiError, match=r"prompt\.1: 2 is not a token id below 2"):
        request.check_vocabulary(2)
    with pytest.raises(ApiError, match=r"logit_bias\.1"):
        request.check_vocabulary(1)


def test_usage_object_omits_details_that_are_zero() -> None:
    plain = usage(9, 5, prefill_ms=39.6, decode_ms=90.2)
    assert plain == {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "helexa_timing": {"prefill_ms": 40, "decode_ms": 90, "prefill_tokens": 9},
    }
    full = usage(9, 5, prefill_ms=1, decode_ms=1, cached_tokens=8, reasoning_tokens=2)
    assert full["helexa_timing"]["prefill_tokens"] == 1
    read = CompletionUsage.model_validate(full)
    assert read.prompt_tokens_details is not None and read.prompt_tokens_details.cached_tokens == 8
    assert read.completion_tokens_details is not None and read.completion_tokens_details.reasoning_tokens == 2


def test_entry_in_the_model_list_omits_unknown_limits() -> None:
    limited = ModelInfo(id="Org/M", limit=Limit(context=8, input=6, output=2), capabilities=["text"])
    entry = model_entry(limited, 1760000000)
    assert entry.get("limit") == {"context": 8, "input": 6, "output": 2}
    assert (entry.get("max_model_len"), entry.get("max_input_tokens"), entry.get("max_output_tokens")) == (8, 6, 2)
    unknown = model_entry(ModelInfo(id="Org/M", status="recovering"), 1)
    assert unknown == {
        "id": "Org/M",
        "object": "model",
        "created": 1,
        "owned_by": "helexa",
        "loaded": False,
        "tool_call": False,
        "reasoning": False,
    }
    assert model_list([entry])["data"] == [entry]
    assert OpenAIModel.model_validate(entry).created == 1760000000


@pytest.mark.parametrize(("stop", "expected"), [("", []), (["", "END"], ["END"]), ("END", ["END"]), (None, None)])
def test_empty_stop_strings_are_ignored(stop: Any, expected: list[str] | None) -> None:
    assert chat(stop=stop).stop == expected


FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tool_choice_allowed_tools_offers_only_the_allowed_tools(mode: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [FUNCTIONS[1]]}}
    request = chat(tools=FUNCTIONS, tool_choice=choice)
    assert request.tool_choice == mode
    assert [tool["function"]["name"] for tool in request.offered_tools] == ["g"]


@pytest.mark.parametrize(
    "allowed",
    [
        None,
        {"mode": "auto", "tools": []},
        {"mode": "never", "tools": FUNCTIONS},
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "h"}}]},
    ],
)
def test_malformed_allowed_tools_in_tool_choice_are_an_error(allowed: Any) -> None:
    with pytest.raises(ApiError) as caught:
        chat(tools=FUNCTIONS, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")
