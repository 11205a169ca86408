"""Translation of requests of Ollama's API to requests of OpenAI's API."""

import base64
import itertools
import json
from typing import Any

import pytest

from helexa.core.errors import ApiError
from helexa.core.wire.openai_chat import ChatRequest
from helexa.cortex.ollama.to_openai import Translation

HI = [{"role": "user", "content": "Hi"}]
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(20)).decode()
JPEG = base64.b64encode(b"\xff\xd8\xff" + bytes(20)).decode()


def parsed(api: str, **fields: Any) -> Translation:
    return Translation.parse(api, json.dumps({"model": "m", **fields}).encode())


def chat(**fields: Any) -> dict[str, Any]:
    return json.loads(parsed("/api/chat", **{"messages": HI, **fields}).body)


def generated(**fields: Any) -> dict[str, Any]:
    return json.loads(parsed("/api/generate", **{"prompt": "Hi", **fields}).body)


def rejected(api: str, **fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        parsed(api, **fields)
    assert caught.value.status == 400
    return str(caught.value)


def test_ollama_chat_is_streamed_unless_stream_is_false() -> None:
    assert chat() == {
        "model": "m",
        "messages": HI,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert chat(stream=False) == {"model": "m", "messages": HI}


def test_ollama_options_become_sampling_fields_and_unsupported_ones_are_reported() -> None:
    options = {"num_predict": 9.0, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0, "seed": 7}
    options |= {"stop": ["\n"], "repeat_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 0.5}
    body = chat(stream=False, options=options)
    assert body == {
        **{"model": "m", "messages": HI, "max_tokens": 9, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0},
        **{"seed": 7, "stop": ["\n"], "repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 0.5},
    }
    translation = parsed("/api/chat", messages=HI, options={"num_ctx": 4096, "mirostat": 1, "top_k": 1, "a\r\nb": 1})
    assert translation.ignored == ["mirostat", "num_ctx"]


def test_ollama_options_that_mean_no_limit_or_no_seed_are_omitted() -> None:
    for options in ({"num_predict": -1}, {"num_predict": -2}, {"seed": -1}, {"repeat_penalty": 2, "repeat_last_n": 0}):
        assert chat(stream=False, options=options) == {"model": "m", "messages": HI}


@pytest.mark.parametrize(
    ("value", "secs"),
    [(0, 0), ("0", 0), (-1, -1), ("-1", -1), (300, 300), ("5m", 300), ("1h30m", 5400), ("300ms", 0.3), ("-1m", -60)],
)
def test_keep_alive_may_be_seconds_or_a_duration(value: Any, secs: float) -> None:
    assert parsed("/api/chat", keep_alive=value).keep_alive == pytest.approx(secs)


def test_ollama_images_become_data_urls_of_their_format() -> None:
    parts = chat(messages=[{"role": "user", "content": "What?", "images": [PNG, JPEG]}])["messages"][0]["content"]
    assert parts[0] == {"type": "text", "text": "What?"}
    urls = [part["image_url"]["url"] for part in parts[1:]]
    assert urls == [f"data:image/png;base64,{PNG}", f"data:image/jpeg;base64,{JPEG}"]
    assert generated(images=[PNG])["messages"][0]["content"][1]["image_url"]["url"].startswith("data:image/png")


def call(name: str, arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}, **fields}


def test_ollama_tool_results_get_the_id_of_the_matching_tool_call() -> None:
    messages = [
        *HI,
        {"role": "assistant", "tool_calls": [call("a", {"x": 1}), call("b", '{"y": 2}'), call("a", None, id="third")]},
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of a"},
        {"role": "tool", "content": "of a", "tool_name": "a"},
        {"role": "tool", "content": "of none"},
        {"role": "tool", "content": "by id", "tool_call_id": "mine"},
    ]
    translated = chat(messages=messages)["messages"]
    calls = [(one["id"], one["function"]["arguments"]) for one in translated[1]["tool_calls"]]
    assert calls == [("call_1", {"x": 1}), ("call_2", {"y": 2}), ("third", {})]
    ids = [message["tool_call_id"] for message in translated[2:]]
    assert ids == ["call_2", "call_1", "third", "call_unknown", "mine"]
    assert translated[2]["name"] == "b"


def test_integers_of_any_size_reach_the_node_exactly() -> None:
    messages = [*HI, {"role": "assistant", "tool_calls": [call("a", {"x": 2**70})]}]
    assert chat(messages=messages)["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"x": 2**70}


@pytest.mark.parametrize(
    ("think", "variables"),
    [
        (False, {"enable_thinking": False}),
        (True, {"enable_thinking": True}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        ("max", {"enable_thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_field_think_becomes_chat_template_variables(think: Any, variables: dict[str, Any]) -> None:
    for body in (chat(think=think), generated(think=think)):
        assert body["chat_template_kwargs"] == variables
        assert body.get("reasoning_effort") == variables.get("reasoning_effort")


def test_thinking_of_earlier_answers_becomes_reasoning_content() -> None:
    answer = {"role": "assistant", "content": "Yes", "thinking": "Hm"}
    assert chat(messages=[*HI, answer, *HI])["messages"][1]["reasoning_content"] == "Hm"


def test_final_assistant_text_sets_continue_final_message() -> None:
    body = chat(messages=[*HI, {"role": "assistant", "content": "Once"}])
    assert body["chat_template_kwargs"] == {"add_generation_prompt": False, "continue_final_message": True}
    assert "chat_template_kwargs" not in chat(messages=[*HI, {"role": "assistant", "content": ""}])


def test_field_format_may_be_json_or_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert chat(format="json")["response_format"] == {"type": "json_object"}
    assert chat(format=schema)["response_format"]["json_schema"]["schema"] == schema
    assert "response_format" not in chat(format="")
    assert rejected("/api/chat", messages=HI, format="xml").startswith("format: ")


def test_generate_skips_the_chat_template_if_raw_or_suffix_is_set() -> None:
    translation = parsed("/api/generate", prompt="Hi", system="Be brief.")
    assert translation.path == "/v1/chat/completions"
    assert json.loads(translation.body)["messages"] == [{"role": "system", "content": "Be brief."}, *HI]
    raw = parsed("/api/generate", prompt="Hi", raw=True, stream=False, options={"num_predict": 3})
    assert (raw.path, json.loads(raw.body)) == ("/v1/completions", {"model": "m", "prompt": "Hi", "max_tokens": 3})
    assert generated(suffix="end", stream=False) == {"model": "m", "prompt": "Hi", "suffix": "end"}


def test_log_probabilities_are_requested_from_the_node_only_if_requested() -> None:
    assert chat(logprobs=True, top_logprobs=3) | {"logprobs": True, "top_logprobs": 3} == chat(
        logprobs=True, top_logprobs=3
    )
    assert generated(raw=True, logprobs=True)["logprobs"] == 0
    assert generated(raw=True, logprobs=True, top_logprobs=2)["logprobs"] == 2


def test_ollama_fields_that_the_gateway_does_not_support_are_rejected_by_name() -> None:
    assert "'template'" in rejected("/api/generate", prompt="Hi", template="{{ .Prompt }}")
    assert "'context'" in rejected("/api/generate", prompt="Hi", context=[1, 2])
    assert "'system'" in rejected("/api/generate", prompt="Hi", raw=True, system="x")
    assert "'images'" in rejected("/api/generate", prompt="Hi", suffix="x", images=[PNG])
    assert generated(template="", context=[])["messages"] == HI  # as Ollama's clients send them


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("/api/chat", {}),
        ("/api/chat", {"messages": []}),
        ("/api/generate", {"system": "x"}),
        ("/api/embed", {"input": []}),
        ("/api/embed", {"input": ""}),
        ("/api/embeddings", {"prompt": ""}),
    ],
)
def test_ollama_request_without_a_prompt_only_loads_or_unloads(api: str, fields: dict[str, Any]) -> None:
    assert parsed(api, **fields).body == b""
    assert not parsed(api, **fields).unloads
    assert parsed(api, **fields, keep_alive=0).unloads


def test_input_of_api_embed_becomes_a_list_of_texts() -> None:
    assert json.loads(parsed("/api/embed", input="a").body)["input"] == ["a"]
    assert json.loads(parsed("/api/embed", input=["a", "b"]).body)["input"] == ["a", "b"]
    assert json.loads(parsed("/api/embeddings", prompt="a").body)["input"] == ["a"]


ZED: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Hi", "images": None},
        {"role": "assistant", "content": "", "thinking": None},
    ],
    "options": {"num_ctx": 8192, "num_predict": None, "stop": None, "temperature": 1.0, "top_p": None},
    **{"tools": [], "think": None, "stream": True, "keep_alive": -1},
}
HOME_ASSISTANT: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    **{"keep_alive": "-1s", "options": {"num_ctx": 8192}, "think": False, "stream": True},
}
OPEN_WEBUI: dict[str, Any] = {"messages": HI, "options": {}, "format": "", "stream": True, "keep_alive": "5m"}
EXAMPLE_OF_OLLAMA: dict[str, Any] = {
    "messages": HI,
    "options": {
        **{"num_keep": 5, "seed": 42, "num_predict": 100, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "typical_p": 0.7},
        **{"repeat_last_n": 33, "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5, "numa": False},
        **{"frequency_penalty": 1.0, "penalize_newline": True, "stop": ["\n", "user:"], "num_ctx": 1024},
        **{"num_batch": 2, "num_gpu": 1, "main_gpu": 0, "use_mmap": True, "num_thread": 8},
    },
}


@pytest.mark.parametrize("body", [ZED, HOME_ASSISTANT, OPEN_WEBUI, EXAMPLE_OF_OLLAMA])
def test_recorded_requests_of_ollama_clients_become_valid_chat_requests(body: dict[str, Any]) -> None:
    request = ChatRequest.from_value(chat(**body))
    assert request.messages[0].content
    assert request.includes_usage


FIELDS = {
    "/api/chat": ("model", "messages", "tools", "format", "options", "keep_alive", "think", "logprobs", "stream"),
    "/api/generate": ("prompt", "suffix", "system", "template", "context", "raw", "images", "options", "format"),
    "/api/embed": ("model", "input", "dimensions", "truncate", "options", "keep_alive"),
    "/api/embeddings": ("prompt", "options", "keep_alive"),
}
DEEP: Any = json.loads("[" * 100 + "]" * 100)
VALUES: list[Any] = [
    *(None, True, 0, -1, 2**70, 1.5, 1e308, "", "x", "\x00", "é" * 200, [], [None], [1], ["x"], [[]], [{}], {}, DEEP),
    *({"a": 1}, {"num_predict": "x"}, {"temperature": "hot"}, {"stop": [1]}, {"top_k": 2**70}, {"seed": 1.5}),
    [{"role": "user"}],
    [{"role": "nobody", "content": "x"}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": "x", "images": "x"}],
    [{"role": "user", "content": "x", "images": ["not base64", ""]}],
    [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "", "arguments": {}}}]}],
    [{"role": "tool", "content": None, "tool_call_id": 1}],
    [{"type": "function", "function": {"name": 1}}],
    [{"type": "function", "function": {"name": "f", "parameters": "x"}}],
]


@pytest.mark.parametrize("api", FIELDS)
def test_any_value_of_any_ollama_field_is_translated_or_a_400(api: str) -> None:
    base: dict[str, Any] = {"messages": HI, "prompt": "Hi", "input": "Hi", "raw": False}
    statuses = set[int]()
    for field, value in itertools.product(FIELDS[api], VALUES):
        try:
            translation = parsed(api, **{**base, field: value})
            assert translation.body == b"" or json.loads(translation.body)["model"] in ("m", value)
            statuses.add(200)
        except ApiError as error:
            assert "\n" not in str(error)
            statuses.add(error.status)
    assert statuses == {200, 400}


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{", b'"x"', b"{}", b'{"model": 1}', b'{"model": "\xff"}'])
@pytest.mark.parametrize("api", FIELDS)
def test_body_that_is_no_valid_ollama_request_is_a_400(api: str, body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        Translation.parse(api, body)
    assert caught.value.status == 400
