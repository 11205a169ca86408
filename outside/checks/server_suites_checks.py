"""Checks with requests from the test suites of llama.cpp's server and of vLLM, sent with OpenAI's Python library."""

import json
import math

import openai
from checking import BASE_MODEL, MODEL, check, expect, run
from openai import OpenAI

client = OpenAI(max_retries=0)
BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
RAW = {"model": BASE_MODEL, "prompt": "The capital of France is", "max_tokens": 5, "temperature": 0}


def _chat(**more: object):
    request = {"model": MODEL, "messages": BOOK, "max_tokens": 8, "temperature": 0}
    return client.chat.completions.create(**request | more)


@check
def finish_reason_length():
    response = _chat()
    assert response.choices[0].finish_reason == "length" and response.usage.completion_tokens == 8


@check
def finish_reason_stop_at_a_stop_string():
    whole = _chat(max_tokens=16).choices[0].message.content
    word = whole.split()[2]
    response = _chat(max_tokens=16, stop=[word]).choices[0]
    assert response.finish_reason == "stop" and word not in response.message.content


@check
def stream_equals_the_whole_answer():
    parts = [chunk.choices[0].delta.content or "" for chunk in _chat(stream=True) if chunk.choices]
    assert "".join(parts) == _chat().choices[0].message.content


@check
def first_chunk_names_the_role_and_the_last_the_reason():
    chunks = list(_chat(stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1


@check
def several_answers():
    response = _chat(n=2, temperature=1)
    assert [choice.index for choice in response.choices] == [0, 1]


@check
def same_seed_same_answer():
    first, second = (_chat(temperature=1, seed=7).choices[0].message.content for _ in range(2))
    assert first == second


@check
def logit_bias_forbids_a_token():
    tokens = _chat(max_tokens=1, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    ids = client.post("/../tokenize", body={"model": MODEL, "prompt": tokens[0].token}, cast_to=object)["tokens"]
    response = _chat(max_tokens=1, logit_bias={str(ids[0]): -100}).choices[0].message.content
    assert response != tokens[0].token


@check
def logprobs_are_logarithms_of_probabilities():
    for entry in _chat(logprobs=True, top_logprobs=4).choices[0].logprobs.content:
        assert entry.logprob <= 0 and sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.001
        assert entry.token.encode() == bytes(entry.bytes) or "\ufffd" in entry.token


@check
def logprobs_in_a_stream():
    chunks = [chunk for chunk in _chat(stream=True, logprobs=True) if chunk.choices[0].logprobs]
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in chunks) == 8


@check
def schemas():
    for schema, right in (
        ({"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]}, lambda value: value["a"] == "x"),
        ({"enum": ["red", "green"]}, lambda value: value in ("red", "green")),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}, lambda value: len(value) == 2),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        assert right(json.loads(_chat(response_format=form, max_tokens=60).choices[0].message.content)), schema


@check
def error_of_a_bad_response_format():
    for form in ({"type": "sound"}, {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}):
        expect(openai.BadRequestError, lambda form=form: _chat(response_format=form))


@check
def errors_of_bad_bodies():
    for bad in (
        {"messages": []},
        {"messages": [{"role": "user", "content": 12}]},
        {"max_tokens": -1},
        {"n": 0},
        {"tools": "none"},
        {"tool_choice": {"type": "function", "function": {"name": "absent"}}},
        {"top_p": 2},
    ):
        expect(openai.BadRequestError, lambda bad=bad: _chat(**bad))


@check
def completions():
    response = client.completions.create(**RAW)
    assert response.object == "text_completion" and response.usage.completion_tokens == 5


@check
def completions_streamed():
    text = "".join(chunk.choices[0].text for chunk in client.completions.create(**RAW, stream=True))
    assert text == client.completions.create(**RAW).choices[0].text


@check
def completions_of_several_prompts():
    response = client.completions.create(**RAW | {"prompt": ["One, two,", "Red, green,"]})
    assert [choice.index for choice in response.choices] == [0, 1]


@check
def completions_of_token_ids():
    body = {"model": BASE_MODEL, "prompt": RAW["prompt"]}
    ids = client.post("/../tokenize", body=body, cast_to=object)["tokens"]
    assert client.completions.create(**RAW | {"prompt": [ids]}).choices[0].text


@check
def completions_echo_with_logprobs():
    response = client.completions.create(**RAW | {"echo": True, "logprobs": 1, "max_tokens": 0}).choices[0]
    assert response.text.endswith(RAW["prompt"])
    assert response.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in response.logprobs.token_logprobs[1:])
    assert len(response.logprobs.tokens) == len(response.logprobs.token_logprobs) == len(response.logprobs.text_offset)


@check
def tokenize_and_back():
    ids = client.post("/../tokenize", body={"model": MODEL, "prompt": "Hello, Wörld"}, cast_to=object)["tokens"]
    text = client.post("/../detokenize", body={"model": MODEL, "tokens": ids}, cast_to=object)
    assert text["prompt"] == "Hello, Wörld"


run()
