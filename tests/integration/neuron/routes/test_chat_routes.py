"""The OpenAI routes over a real socket, also with OpenAI's client, and with a scripted engine."""

import asyncio
import io
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import msgspec
import openai
import pytest
import tokenizers
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import Regex, decoders, models, pre_tokenizers

from helexa.neuron.admission import Admission
from helexa.neuron.config import AdmissionConfig
from helexa.neuron.engine.ipc.messages import Generate, PrefixMiss
from helexa.neuron.routes import replies_disconnects_and_errors
from local_tokenizers import of_backend
from neuron.scripted_engine import CONTEXT, MODEL, TOKENIZER, Say, answer, endless, failing
from neuron.scripted_node import CHAT, TEXT, USAGE, Node, serve

USER = CHAT["messages"][0]
NAMED = {"type": "function", "function": {"name": "other"}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "helexa")


async def test_engine_of_a_recurrent_model_gets_the_position_where_the_last_turn_starts() -> None:
    async with serve(answer("x")) as node:
        await node.post("/v1/chat/completions", CHAT)
        node.engine.ready = msgspec.structs.replace(node.engine.ready, state_bytes=1)
        await node.post("/v1/chat/completions", CHAT)
    first, second = node.engine.requests
    assert first.turn == 0
    tokenizer, first_question = node.model.text.tokenizer, CHAT["messages"][-1]["content"]
    assert first_question not in tokenizer.decode(second.prompt[: second.turn])
    assert first_question in tokenizer.decode(second.prompt[second.turn :])
    assert second.turn > 0


# --- complete responses


async def test_chat_completion_matches_the_response_type_of_the_openai_library() -> None:
    async with (
        serve(answer('Grüße 🦊\n"quoted"')) as node,
        node.http.post(f"{node.url}/v1/chat/completions", json=CHAT) as response,
    ):
        completion = ChatCompletion.model_validate_json(await response.read())
        (choice,) = completion.choices
        assert (choice.message.role, choice.message.content, choice.message.refusal) == (
            "assistant",
            'Grüße 🦊\n"quoted"',
            None,
        )
        assert choice.finish_reason == "stop"
        assert (completion.model, completion.object) == (MODEL, "chat.completion")
        prompt = len(node.engine.requests[0].prompt)
        assert completion.usage is not None
        tokens = len('Grüße 🦊\n"quoted"'.encode()) + 1
        assert completion.usage.to_dict() == {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "helexa_timing": {"prefill_ms": 12, "decode_ms": 34, "prefill_tokens": prompt},
        }


async def test_engine_gets_the_rendered_conversation_and_the_sampling_parameters() -> None:
    async with serve(answer("ok", finish="length")) as node:
        completion = await node.openai.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "refusal": None},
            ],
            temperature=0.25,
            top_p=0.5,
            seed=7,
            max_tokens=99,
            max_completion_tokens=3,
            logit_bias={"5": -100},
            extra_body={"top_k": 9, "min_p": 0.1, "repetition_penalty": 1.1, "mirostat": 2, "metadata": {"a": "b"}},
        )
        assert completion.choices[0].finish_reason == "length"
        (sent,) = node.engine.requests
        assert TOKENIZER.decode(sent.prompt, skip_special=False) == (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
            "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
        )
        assert sent.max_tokens == 3
        sampling = sent.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 9, 0.1)
        assert (sampling.repetition_penalty, sampling.seed, sampling.logit_bias) == (1.1, 7, {5: -100})


async def test_null_fields_are_ignored_and_role_developer_becomes_system() -> None:
    nulls = dict.fromkeys(["max_tokens", "temperature", "stop", "stream", "tools", "seed", "logit_bias", "n", "top_p"])
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y", "name": None}]
    async with serve(answer("ok")) as node:
        status, _ = await node.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **nulls})
        assert status == 200
        assert "<|im_start|>system\nx" in TOKENIZER.decode(node.engine.requests[0].prompt, skip_special=False)


@pytest.mark.parametrize("prompt", ["once", ["once"], TOKENIZER.encode("once"), [TOKENIZER.encode("once")]])
async def test_text_completion_accepts_a_prompt_of_text_or_token_ids(prompt: object) -> None:
    async with serve(answer(" upon")) as node:
        async with node.http.post(f"{node.url}/v1/completions", json={"model": MODEL, "prompt": prompt}) as response:
            completion = Completion.model_validate_json(await response.read())
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == (" upon", "stop")
        assert completion.usage is not None and completion.usage.prompt_tokens == 4
        assert node.engine.requests[0].prompt == TOKENIZER.encode("once")


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_usage_with_and_without_streaming_includes_cached_tokens(path: str, body: dict[str, Any]) -> None:
    async with serve(answer("Hello", cached=3)) as node:
        _, complete = await node.post(path, body)
        *_, last, _ = await node.events(path, body | USAGE)
        prompt = len(node.engine.requests[0].prompt)
        for usage in (complete["usage"], json.loads(last)["usage"]):
            assert usage["prompt_tokens"] == prompt
            assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
            assert usage["helexa_timing"]["prefill_tokens"] == prompt - 3


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
async def test_prefix_cache_salt_is_set_only_if_account_and_key_headers_are_present(
    path: str, body: dict[str, Any]
) -> None:
    async def salt_of(node: Node, headers: dict[str, str]) -> str:
        async with node.http.post(f"{node.url}{path}", json=body, headers=headers) as response:
            assert response.status == 200
        return str(node.engine.requests[-1].salt)

    account, key = "x-helexa-account-id", "x-helexa-key-id"
    async with serve(answer("Hello")) as node:
        one = await salt_of(node, {account: "acme", key: "k1"})
        assert one == await salt_of(node, {account: "acme", key: "k1"})
        others = [
            await salt_of(node, {account: a, key: k}) for a, k in (("acme", "k2"), ("acm", "ek1"), ("k1", "acme"))
        ]
        assert len({one, *others, ""}) == 5
        assert len(await salt_of(node, {account: "x" * 5000, key: "y"})) == len(one) <= 64
        for headers in ({}, {account: "acme"}, {key: "k1"}, {account: "", key: "k1"}):
            assert await salt_of(node, headers) == ""


# --- streams


async def test_chat_stream_sends_role_text_finish_reason_usage_and_done_in_this_order() -> None:
    async with serve(answer("Grüße 🦊")) as node:
        *data, done = await node.events("/v1/chat/completions", CHAT | USAGE)
    assert done == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(event) for event in data]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    role, *deltas, finish, usage = chunks
    assert role.choices[0].delta.to_dict() == {"role": "assistant"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == "Grüße 🦊"
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "\ufffd") for chunk in deltas)
    assert [chunk.choices[0].finish_reason for chunk in (role, *deltas)] == [None] * (len(deltas) + 1)
    assert (finish.choices[0].finish_reason, finish.choices[0].delta.to_dict()) == ("stop", {})
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.completion_tokens == len("Grüße 🦊".encode()) + 1
    assert usage.usage.to_dict()["helexa_timing"]["prefill_ms"] == 12  # type: ignore[index]


async def test_openai_client_reads_a_chat_stream() -> None:
    async with serve(answer("a b c")) as node:
        stream = await node.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
        text = ""
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == "a b c"


async def test_text_completion_stream_sends_text_finish_reason_usage_and_done_in_this_order() -> None:
    async with serve(answer(" upon")) as node:
        *data, done = await node.events("/v1/completions", TEXT | USAGE)
    *deltas, finish, usage = [json.loads(event) for event in data]  # OpenAI's own type knows no null finish reason
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in deltas) == " upon"
    assert {chunk["choices"][0]["finish_reason"] for chunk in deltas} == {None}
    assert (finish["choices"][0]["finish_reason"], finish["choices"][0]["text"]) == ("stop", "")
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 6)


async def test_openai_client_reads_a_text_completion_stream() -> None:
    async with serve(answer(" upon")) as node:
        stream = await node.openai.completions.create(model=MODEL, prompt="once", stream=True)
        assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == " upon"


@pytest.mark.parametrize("stop", ["three", ["zzz", "three"]])
async def test_stop_strings_end_streamed_and_non_streaming_answers(stop: object) -> None:
    async with serve(endless("one two three")) as node:
        *data, _ = await node.events("/v1/chat/completions", {**CHAT, "stop": stop})
        chunks = [ChatCompletionChunk.model_validate_json(event) for event in data]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        status, complete = await node.post("/v1/chat/completions", {**CHAT, "stop": stop})
        assert status == 200
        assert text == complete["choices"][0]["message"]["content"] == "one two "
        assert chunks[-1].choices[0].finish_reason == complete["choices"][0]["finish_reason"] == "stop"
        assert json.loads(data[-1])["choices"][0]["stop_reason"] == complete["choices"][0]["stop_reason"] == "three"
        assert node.engine.open_streams == 0


async def test_continue_final_message_continues_the_last_assistant_message() -> None:
    begun = [*CHAT["messages"], {"role": "assistant", "content": "Once"}]
    async with serve(answer(" upon")) as node:
        for fields in ({"continue_final_message": True}, {"add_generation_prompt": False}, {}):
            status, reply = await node.post("/v1/chat/completions", {**CHAT, "messages": begun, **fields})
            assert status == 200, reply
        going_on, bare, usual = [TOKENIZER.decode(request.prompt) for request in node.engine.requests]
    assert going_on.endswith("Once") and bare.endswith("Once\n") and usual.endswith("assistant\n")


async def test_stream_without_new_text_sends_keep_alive_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies_disconnects_and_errors, "KEEP_ALIVE_SECONDS", 0.01)
    speak = asyncio.Event()

    async def script(request: object, say: Any) -> None:
        await speak.wait()
        say(tokens=TOKENIZER.encode("at last"), finish="length")

    async with (
        serve(script) as node,
        node.http.post(f"{node.url}/v1/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        lines = [await response.content.readline() for _ in range(8)]
        assert b'"role":"assistant"' in lines[0]
        assert [line[:2] for line in lines[2::2]] == [b": "] * 3
        speak.set()
        assert b"at last" in await response.content.read()


async def test_stream_sends_its_first_event_before_the_prefill_ends() -> None:
    async with (
        serve(endless("")) as node,
        node.http.post(f"{node.url}/v1/chat/completions", json={**CHAT, "stream": True}) as response,
    ):
        assert b'"role":"assistant"' in await response.content.readline()


# --- disconnects


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_of_the_client_cancels_the_request_in_the_engine(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(endless("hello")) as node:
        value = {**CHAT, **TEXT, "stream": stream}
        asking = asyncio.create_task(node.http.post(f"{node.url}{path}", json=value).__aenter__())
        await node.engine.submitted.wait()
        if stream:
            response = await asking
            await response.content.readline()
            response.close()
        else:
            asking.cancel()
        await node.engine.cancelled.wait()
        assert node.engine.open_streams == 0
    (line,) = [record.getMessage() for record in caplog.records if "completed " in record.getMessage()]
    assert "client_gone=True" in line and "finish_reason=cancelled" in line


async def test_disconnect_of_a_client_that_reads_nothing_cancels_its_request() -> None:
    flooded = asyncio.Event()

    async def flood(request: object, say: Any) -> None:
        for number in count():
            say(tokens=TOKENIZER.encode("x" * 10_000))
            await asyncio.sleep(0)
            if number == 50:
                flooded.set()  # more text than the client reads before its caller does

    async with serve(flood) as node:
        response = await node.http.post(f"{node.url}/v1/chat/completions", json={**CHAT, "stream": True})
        await flooded.wait()
        response.close()
        await node.engine.cancelled.wait()


# --- failures


async def test_engine_failure_in_a_stream_is_an_error_event() -> None:
    async with serve(failing("hel", "the model was unloaded")) as node:
        *data, error, done = await node.events("/v1/chat/completions", CHAT)
        assert done == "[DONE]"
        assert json.loads(error)["error"]["message"] == "the model was unloaded"
        assert "hel" in data[-1]
        stream = await node.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
        with pytest.raises(openai.APIError, match="the model was unloaded"):
            async for _ in stream:
                pass


async def test_engine_failure_without_streaming_is_500() -> None:
    async with serve(failing("hel", "the model was unloaded")) as node:
        assert await node.error("/v1/chat/completions", CHAT) == (500, None, "the model was unloaded")


@pytest.mark.parametrize("stream", [True, False])
async def test_request_to_a_model_without_free_slots_is_503_with_retry_after(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(answer("x")) as node, AsyncExitStack() as inside:
        node.model.admission = Admission(AdmissionConfig(max_in_flight=1, max_queue_depth=0), node.engine)
        await inside.enter_async_context(node.model.admission.admit("another", 1, 1))
        url = f"{node.url}/v1/chat/completions"
        async with node.http.post(url, json={**CHAT, "stream": stream}) as response:
            assert response.status == 503
            assert int(response.headers["retry-after"]) > 0
            error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("refused ")]
        assert "status=503" in line and "1 of 1 requests run, 0 of 0 wait" in line
        assert node.engine.requests == []


async def test_unexpected_exception_reveals_no_details_to_the_client(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(answer("x")) as node:
        del node.model.text
        status, code, message = await node.error("/v1/chat/completions", CHAT)
        assert (status, code) == (500, None)
        assert "attribute" not in message


def _with(base: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**base, **fields}


def _message(**fields: Any) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", **fields}]}


def _schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


async def test_text_that_the_tokenizer_cannot_encode_is_422() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "Ċ": 2}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")  # the library gives up
    backend.decoder = decoders.ByteLevel()
    text = "a" * 30 + "b"
    async with serve(answer("x"), tokenizer=of_backend(backend, eos_id=1)) as node:
        for path, request in (
            ("/v1/chat/completions", _message(content=text)),
            ("/v1/chat/completions", _message(content=text) | {"stream": True}),
            ("/v1/completions", TEXT | {"prompt": text}),
        ):
            status, code, message = await node.error(path, request)
            assert (status, code) == (422, "tokenization_failed")
            assert "the tokenizer fails on this text" in message
        assert (await node.post("/v1/completions", TEXT | {"prompt": "a"}))[0] == 200


BAD_CHATS = [
    (_with(CHAT, model="Org/Other"), 404, "model_not_found", "'Org/Other'"),
    (_with(CHAT, model=None), 400, "missing_model_field", "model"),
    ({"messages": [USER]}, 400, "missing_model_field", "model"),
    (_with(CHAT, model=5), 400, "invalid_request_body", "model: "),
    ({"model": MODEL}, 400, "invalid_request_body", "messages: "),
    (_with(CHAT, messages=[]), 400, "invalid_request_body", "messages: "),
    (_with(CHAT, messages="hi"), 400, "invalid_request_body", "messages: "),
    (_with(CHAT, messages=[USER, 5]), 400, "invalid_request_body", "messages.1: "),
    (_message(content=5), 400, "invalid_request_body", "messages.0.content: "),
    (_message(content=[5]), 400, "invalid_request_body", "messages.0.content: "),
    (_message(content=[{"type": "text"}]), 400, "invalid_request_body", "messages.0.content: part 0"),
    (_message(content=[{"type": "smell"}]), 400, "invalid_request_body", "'smell'"),
    (_with(CHAT, messages=[{"role": "robot", "content": "x"}]), 400, "invalid_request_body", "messages.0.role: "),
    (_with(CHAT, messages=[{"content": "x"}]), 400, "invalid_request_body", "messages.0.role: "),
    (_message(content=[{"type": "image_url", "image_url": {"url": "data:,"}}]), 400, "vision_unsupported", MODEL),
    (CHAT | {"messages": [USER] * (CONTEXT + 1)}, 400, "context_length_exceeded", f"{CONTEXT + 1} tokens"),
    (_message(content="x" * CONTEXT), 400, "context_length_exceeded", f"maximum context length is {CONTEXT} tokens"),
    (_with(CHAT, max_tokens=0), 400, "invalid_request_body", "max_tokens: "),
    (_with(CHAT, max_tokens=-2), 400, "invalid_request_body", "max_tokens: "),
    (_with(CHAT, max_completion_tokens=0), 400, "invalid_request_body", "max_completion_tokens: "),
    (_with(CHAT, max_tokens="many"), 400, "invalid_request_body", "max_tokens: "),
    (_with(CHAT, max_tokens=True), 400, "invalid_request_body", "max_tokens: "),
    (_with(CHAT, temperature=float("nan")), 400, "invalid_request_body", "temperature: "),
    (_with(CHAT, temperature=float("inf")), 400, "invalid_request_body", "temperature: "),
    (_with(CHAT, temperature=2.1), 400, "invalid_request_body", "temperature: "),
    (_with(CHAT, temperature="hot"), 400, "invalid_request_body", "temperature: "),
    (_with(CHAT, top_p=1.5), 400, "invalid_request_body", "top_p: "),
    (_with(CHAT, top_k=-2), 400, "invalid_request_body", "top_k: "),
    (_with(CHAT, min_p=1.1), 400, "invalid_request_body", "min_p: "),
    (_with(CHAT, repetition_penalty=0), 400, "invalid_request_body", "repetition_penalty: "),
    (_with(CHAT, presence_penalty=3), 400, "invalid_request_body", "presence_penalty: "),
    (_with(CHAT, stream="yes"), 400, "invalid_request_body", "stream: "),
    (_with(CHAT, stop=["x" * 257]), 400, "invalid_request_body", "stop.0: "),
    (_with(CHAT, stop=["x"] * 17), 400, "invalid_request_body", "stop: "),
    (_with(CHAT, stop=5), 400, "invalid_request_body", "stop: "),
    (_with(CHAT, logit_bias={"a": 1}), 400, "invalid_request_body", "logit_bias.a: "),
    (_with(CHAT, logit_bias={"1": 101}), 400, "invalid_request_body", "logit_bias.1: "),
    (_with(CHAT, logit_bias={"100000": 1}), 400, "invalid_request_body", "logit_bias.100000: "),
    (_with(CHAT, n=0), 400, "invalid_request_body", "n: "),
    (_with(CHAT, n=17), 400, "invalid_request_body", "n: "),
    (
        _with(CHAT, tools=[{"type": "function"}]),
        400,
        "invalid_request_body",
        "tools.0: the 'function' of a tool must be",
    ),
    (_with(CHAT, tools=[{"type": "function", "function": {"name": ""}}]), 400, "invalid_request_body", "tools.0: "),
    (_with(CHAT, tools=[{"type": "web_search"}]), 400, "unsupported_parameter", "'tools.0.type'"),
    (_with(CHAT, tools=[TOOL]), 400, "unsupported_parameter", "does not support tools"),
    (_with(CHAT, tools=[TOOL] * 513), 400, "invalid_request_body", "tools: "),
    (_with(CHAT, parallel_tool_calls="no"), 400, "invalid_request_body", "parallel_tool_calls: "),
    (_with(CHAT, reasoning_effort="enormous"), 400, "invalid_request_body", "reasoning_effort: "),
    (_with(CHAT, tool_choice="required"), 400, "invalid_request_body", "tool_choice: asks for a call"),
    (_with(CHAT, tools=[TOOL], tool_choice="always"), 400, "unsupported_parameter", "'tool_choice' cannot be 'always'"),
    (_with(CHAT, tools=[TOOL], tool_choice={"type": "custom"}), 400, "unsupported_parameter", "'custom'"),
    (_with(CHAT, tools=[TOOL], tool_choice=NAMED), 400, "invalid_request_body", "there is no tool 'other'"),
    (_with(CHAT, logprobs=1), 400, "invalid_request_body", "logprobs: "),
    (_with(CHAT, top_logprobs=2), 400, "invalid_request_body", "top_logprobs: "),
    (_with(CHAT, logprobs=True, top_logprobs=21), 400, "invalid_request_body", "top_logprobs: "),
    (_with(CHAT, response_format={"type": "xml"}), 400, "unsupported_parameter", "type of 'response_format'"),
    (_with(CHAT, response_format={"type": "json_schema"}), 400, "invalid_request_body", "response_format.json_schema"),
    (_with(CHAT, guided_choice=[]), 400, "invalid_request_body", "guided_choice: "),
    (_with(CHAT, guided_json="{"), 400, "invalid_request_body", "guided_json: not valid JSON"),
    (_with(CHAT, guided_json="[]"), 400, "invalid_request_body", "guided_json: must be"),
    (_with(CHAT, guided_regex="a", guided_choice=["b"]), 400, "invalid_request_body", "combined with 'guided_regex'"),
    (_with(CHAT, guided_regex="("), 400, "invalid_grammar", "guided_regex"),
    (_with(CHAT, guided_grammar="root ::= x"), 400, "invalid_grammar", "Lark"),
    (_with(CHAT, guided_whitespace_pattern="x"), 400, "unsupported_parameter", "'guided_whitespace_pattern'"),
    (_with(CHAT, structured_outputs={"regex": 5}), 400, "invalid_request_body", "structured_outputs.regex: "),
    (_with(CHAT, structured_outputs={"structural_tag": "x"}), 400, "unsupported_parameter", "structural_tag"),
    (_with(CHAT, response_format=_schema({"type": "strange"})), 400, "invalid_schema", "response_format"),
    (_with(CHAT, modalities=["text", "audio"]), 400, "unsupported_parameter", "'modalities'"),
    (_with(CHAT, audio={"voice": "x"}), 400, "unsupported_parameter", "'audio'"),
    (_with(CHAT, chat_template_kwargs={"messages": []}), 400, "unsupported_parameter", "'messages'"),
    ([1], 400, "invalid_request_body", "object"),
    (None, 400, "invalid_request_body", "object"),
]

BAD_TEXTS = [
    ({"model": MODEL}, 400, "invalid_request_body", "prompt: "),
    (_with(TEXT, prompt=""), 400, "invalid_request_body", "prompt: "),
    (_with(TEXT, prompt=[]), 400, "invalid_request_body", "prompt: "),
    (_with(TEXT, prompt=[[]]), 400, "invalid_request_body", "prompt: "),
    (_with(TEXT, prompt=None), 400, "invalid_request_body", "prompt: "),
    (_with(TEXT, prompt=[1, "a"]), 400, "invalid_request_body", "prompt: "),
    (_with(TEXT, prompt=[True]), 400, "invalid_request_body", "prompt: "),
    (_with(TEXT, prompt=[3, -1]), 400, "invalid_request_body", "prompt.1: "),
    (_with(TEXT, prompt=[10**30]), 400, "invalid_request_body", "prompt.0: "),
    (_with(TEXT, prompt=[1] * CONTEXT), 400, "context_length_exceeded", f"{CONTEXT} tokens"),
    (_with(TEXT, prompt=["a", ""]), 400, "invalid_request_body", "prompt: prompt 1 must not be empty"),
    (_with(TEXT, prompt=[[1], 2]), 400, "invalid_request_body", "prompt: the prompt must be a string or"),
    (_with(TEXT, prompt=[[1], [True]]), 400, "invalid_request_body", "prompt: prompt 1 must be"),
    (_with(TEXT, prompt=[[1], [2, -1]]), 400, "invalid_request_body", "prompt.1.1: -1 is not a token id"),
    (_with(TEXT, prompt=["a"] * 129), 400, "invalid_request_body", "at most 128 prompts"),
    (_with(TEXT, prompt=["a"] * 65, n=2), 400, "invalid_request_body", "n: 65 prompts x 2 completions"),
    (_with(TEXT, suffix="x"), 400, "unsupported_parameter", "'suffix'"),
    (_with(TEXT, echo=True, logprobs=20, prompt=["a" * 900] * 64), 400, "unsupported_parameter", "logprobs"),
    (_with(TEXT, echo=True, prompt=[3, -1]), 400, "invalid_request_body", "prompt.1: "),
    (_with(TEXT, best_of=2), 400, "unsupported_parameter", "'best_of'"),
    (_with(TEXT, logprobs=21), 400, "invalid_request_body", "logprobs: "),
    (_with(TEXT, logprobs=True), 400, "invalid_request_body", "logprobs: "),
    (_with(TEXT, guided_regex="("), 400, "invalid_grammar", "guided_regex"),
    (_with(TEXT, max_tokens=-2), 400, "invalid_request_body", "max_tokens: "),
]


async def test_each_invalid_request_gets_its_status_and_error_code(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(answer("x")) as node:
        for path, cases in (("/v1/chat/completions", BAD_CHATS), ("/v1/completions", BAD_TEXTS)):
            for value, *expected, text_in_message in cases:
                for streamed in (False, True):
                    request = {"stream": streamed, **value} if isinstance(value, dict) else value
                    caplog.clear()
                    status, code, message = await node.error(path, request)
                    assert [status, code] == expected, (value, message)
                    assert text_in_message in message and "\n" not in message, (value, message)
                    warnings = [line for line in caplog.messages if line.startswith("refused ")]
                    assert len(warnings) == 1 and f"code={code}" in warnings[0]
        assert node.engine.requests == []


@pytest.mark.parametrize(
    ("data", "content_type", "status", "code"),
    [
        (b'{"model": ', "application/json", 400, "malformed_json"),
        (b"", "application/json", 400, "malformed_json"),
        (b"[" * 100_000, "application/json", 400, "malformed_json"),
        (b'{"model": "\xff"}', "application/json", 400, "malformed_json"),
        (b"{}", "text/plain", 415, "unsupported_media_type"),
        (b"{}", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b"{}", "application/json; charset=utf-8", 400, "invalid_request_body"),
    ],
)
async def test_body_that_is_not_json_is_rejected(data: bytes, content_type: str, status: int, code: str) -> None:
    async with serve(answer("x")) as node:
        headers = {"content-type": content_type}
        async with node.http.post(f"{node.url}/v1/chat/completions", data=data, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (status, code)


async def test_json_without_a_content_type_is_415() -> None:
    async with serve(answer("x")) as node:
        data = json.dumps(CHAT).encode()
        skip = {"skip_auto_headers": ("content-type",)}
        async with node.http.post(f"{node.url}/v1/chat/completions", data=data, **skip) as response:  # type: ignore[arg-type]
            assert "content-type" not in response.request_info.headers
            assert response.status == 415


async def test_too_large_request_body_is_rejected_during_the_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helexa.neuron.routes.replies_disconnects_and_errors.MAX_BODY_BYTES", 1 << 20)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * (1 << 16)

    headers = {"content-type": "application/json"}
    async with serve(answer("x")) as node:
        for data in (chunks(), io.BytesIO(b" " * (1 << 20) + b"{}")):
            async with node.http.post(f"{node.url}/v1/completions", data=data, headers=headers) as response:
                assert response.status == 413
                assert (await response.json())["error"]["code"] == "request_too_large"


async def test_error_raised_by_the_chat_template_is_422() -> None:
    async with serve(answer("x"), "{{ raise_exception('roles must alternate') }}") as node:
        status, code, message = await node.error("/v1/chat/completions", CHAT)
        assert (status, code) == (422, "template_render_failed")
        assert "roles must alternate" in message


async def test_unknown_path_or_method_gets_an_error_object_with_its_code() -> None:
    async with serve(answer("x")) as node:
        assert (await node.error("/v1/nothing", {}))[:2] == (404, "not_found")
        async with node.http.get(f"{node.url}/v1/chat/completions") as response:
            assert (response.status, response.headers["allow"]) == (405, "POST")
            assert (await response.json())["error"]["code"] == "method_not_allowed"


# --- models


async def test_openai_client_lists_models() -> None:
    async with serve(answer("x")) as node:
        (entry,) = (await node.openai.models.list()).data
        assert (entry.id, entry.owned_by, entry.object) == (MODEL, "helexa", "model")
        assert entry.to_dict() | {"created": 0} == {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "helexa",
            "loaded": True,
            "capabilities": ["text"],
            "limit": {"context": CONTEXT, "input": CONTEXT * 3 // 4, "output": CONTEXT // 4},
            "max_model_len": CONTEXT,
            "max_input_tokens": CONTEXT * 3 // 4,
            "max_output_tokens": CONTEXT // 4,
            "tool_call": False,
            "reasoning": False,
        }
        assert (await node.openai.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError, match="not found"):
            await node.openai.models.retrieve("Org/Other")


@pytest.mark.parametrize("field", ["messages", "prompt"])
async def test_response_and_log_name_the_message_whose_change_caused_a_cache_miss(
    field: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "helexa")
    words = " ".join(map(str, range(200)))
    messages = [{"role": "system", "content": words}, {"role": "user", "content": "Today is Friday. 0 1 2 3 4"}]
    body = {"model": MODEL, "messages": messages} if field == "messages" else {"model": MODEL, "prompt": words}

    async def changed(request: Generate, say: Say) -> None:
        before, _, _ = TOKENIZER.decode(request.prompt, skip_special=False).partition(
            "Friday" if field == "messages" else "99"
        )
        say(cached_tokens=0, miss=PrefixMiss(position=len(TOKENIZER.encode(before)), reason="changed"))
        await answer("hi")(request, say)

    async with serve(changed) as node:
        path = "/v1/chat/completions" if field == "messages" else "/v1/completions"
        miss = (await node.post(path, body))[1]["usage"]["helexa_cache_miss"]
        streamed = json.loads((await node.events(path, body | USAGE))[-2])["usage"]["helexa_cache_miss"]
    assert streamed == miss
    text = "oday is Friday. 0 1 2 3 " if field == "messages" else "6 97 98 99 100 101 102 1"
    assert miss.pop("text") == text
    assert miss.pop("position") > 200
    assert miss == {"reason": "changed"} | ({"message": 1, "role": "user"} if field == "messages" else {})
    lines = [line for line in caplog.messages if line.startswith("computed a prompt again")]
    assert len(lines) == 2 and "reason=changed" in lines[0] and "Friday" not in lines[0]


async def test_stream_for_a_gateway_starts_with_the_prompt_token_counts_if_requested() -> None:
    async def slow(request: Generate, say: Say) -> None:
        say(started=True, cached_tokens=2)
        await asyncio.sleep(0)
        await answer("hi")(request, say)

    for script in (slow, answer("hi", cached=2)):
        async with serve(script) as node:
            node.http.headers["x-helexa-include-usage"] = "prompt"
            chunks = [json.loads(event) for event in (await node.events("/v1/chat/completions", CHAT))[:-1]]
        prompt = chunks[-1]["usage"]["prompt_tokens"]
        assert [chunk.get("helexa_prompt") for chunk in chunks[:2]] == [
            None,
            {"prompt_tokens": prompt, "cached_tokens": 2},
        ]
        assert not any("helexa_prompt" in chunk for chunk in chunks[2:])
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
