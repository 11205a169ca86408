"""`n`, `logprobs` and `echo` over a real socket, with a scripted engine."""

import asyncio
import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from starlette.routing import Mount, Router

from helexa.core.errors import service_unavailable
from helexa.neuron.access_guard_and_request_logs import RequestMiddleware
from helexa.neuron.admission import Admission
from helexa.neuron.config import AdmissionConfig
from helexa.neuron.engine.ipc.messages import Generate
from helexa.neuron.requests.metrics import Metrics
from helexa.neuron.requests.request_and_run_records import UsageRecords
from neuron.scripted_engine import AGENT_TEMPLATE, END, TIMING, TOKENIZER, Say, answer
from neuron.scripted_node import CHAT, ROUTES, TEXT, USAGE, Node, serve

PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


async def by_number(request: Generate, say: Say) -> None:
    """Generate one letter for the first request, two for the second, and so on."""
    for index in range(request.id):
        say(tokens=TOKENIZER.encode("x"), cached_tokens=0 if index or request.id == 1 else 3)
        await asyncio.sleep(0)
    say(tokens=[END], finish="stop", timing=TIMING)


async def likely(request: Generate, say: Say) -> None:
    """Generate text with log-probabilities. For each byte, a space is the more likely alternative."""
    assert request.sampling.logprobs is not None
    space = (TOKENIZER.encode(" ")[0], -0.5)
    text = TOKENIZER.encode("aé b")
    for index, token in enumerate(text):
        top = [space, (token, -1.0 - index)][: request.sampling.logprobs]
        say(tokens=[token], logprobs=[(-1.0 - index, top)])
        await asyncio.sleep(0)
    say(tokens=[END], logprobs=[(-0.1, [])], finish="stop", timing=TIMING)


def texts(data: list[str]) -> dict[int, str]:
    """Return the text of each choice of a stream."""
    output: dict[int, str] = {}
    for chunk in map(json.loads, data[:-2]):
        for choice in chunk["choices"]:
            output.setdefault(choice["index"], "")
            output[choice["index"]] += choice.get("text", "") or choice.get("delta", {}).get("content", "") or ""
    return output


async def complete(node: Node, path: str, **fields: Any) -> dict[str, Any]:
    status, reply = await node.post(path, {**PATHS[path], **fields})
    assert status == 200, reply
    (ChatCompletion if "chat" in path else Completion).model_validate(reply)
    return reply


@pytest.mark.parametrize("path", PATHS)
async def test_n_answers_to_one_prompt_are_returned_with_the_prompt_counted_once(path: str) -> None:
    async with serve(by_number) as node:
        reply = await complete(node, path, n=3, seed=7)
        output = [choice.get("text") or choice["message"]["content"] for choice in reply["choices"]]
        assert output == ["x", "xx", "xxx"]
        assert [(choice["index"], choice["finish_reason"]) for choice in reply["choices"]] == [
            (0, "stop"),
            (1, "stop"),
            (2, "stop"),
        ]
        prompt = len(node.engine.requests[0].prompt)
        assert reply["usage"]["prompt_tokens"] == prompt  # counted once
        assert reply["usage"]["completion_tokens"] == 1 + 2 + 3 + 3
        assert [request.sampling.seed for request in node.engine.requests] == [7, 8, 9]
        assert node.engine.open_streams == 0


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("prompt", ["once", ["once", "twice", "once"]])
async def test_usage_record_of_a_request_equals_the_usage_in_its_answer(prompt: str | list[str], choices: int) -> None:
    records, usage_id = UsageRecords(), "ab" * 16
    recorded = RequestMiddleware(Router(ROUTES), Metrics({}), records)
    async with serve(by_number, routes=[Mount("/", recorded)]) as node:
        node.http.headers["x-helexa-usage-id"] = usage_id
        usage = (await complete(node, "/v1/completions", prompt=prompt, n=choices))["usage"]
        record = await records.find(usage_id)
    assert record is not None
    assert (record.prompt_tokens, record.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert record.cached_tokens == usage.get("prompt_tokens_details", {"cached_tokens": 0})["cached_tokens"]


@pytest.mark.parametrize("path", PATHS)
async def test_n_streamed_answers_have_their_own_index_and_one_usage(path: str) -> None:
    async with serve(by_number) as node:
        data = await node.events(path, {**PATHS[path], **USAGE, "n": 3})
        assert texts(data) == {0: "x", 1: "xx", 2: "xxx"}
        chunks = [json.loads(event) for event in data[:-1]]
        finishes = [
            (choice["index"], choice["finish_reason"])
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["finish_reason"]
        ]
        assert sorted(finishes) == [(0, "stop"), (1, "stop"), (2, "stop")]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]] == [9]
        if "chat" in path:
            roles = [c["index"] for chunk in chunks for c in chunk["choices"] if "role" in c["delta"]]
            assert roles == [0, 1, 2]


async def test_later_answers_to_a_prompt_begin_after_the_prefill_of_the_first() -> None:
    go = asyncio.Event()

    async def script(request: Generate, say: Say) -> None:
        await go.wait()
        say(tokens=[END], finish="stop", timing=TIMING)

    async with serve(script) as node:
        running = asyncio.create_task(complete(node, "/v1/completions", n=4))
        await node.engine.submitted.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(node.engine.requests) == 1
        go.set()
        assert len((await running)["choices"]) == 4


@pytest.mark.parametrize("stream", [True, False])
async def test_several_answers_run_one_after_another_if_only_one_slot_is_free(stream: bool) -> None:
    async with serve(by_number) as node:
        node.model.admission = Admission(AdmissionConfig(max_in_flight=1), node.engine)
        if stream:
            assert texts(await node.events("/v1/completions", {**TEXT, "n": 3})) == {0: "x", 1: "xx", 2: "xxx"}
        else:
            assert len((await complete(node, "/v1/completions", n=3))["choices"]) == 3


async def test_failure_of_one_of_several_answers_fails_the_request() -> None:
    async def script(request: Generate, say: Say) -> None:
        if request.id == 1:
            say(tokens=TOKENIZER.encode("x"))
            await asyncio.Event().wait()
        say(finish="error", error="it broke")

    async with serve(script) as node:
        assert await node.error("/v1/completions", {**TEXT, "n": 2}) == (500, None, "it broke")
        assert node.engine.cancelled.is_set() and node.engine.open_streams == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_rejection_of_the_first_of_several_answers_rejects_the_request(stream: bool) -> None:
    async with serve(answer("x")) as node:
        refused = await node.error("/v1/completions", {**TEXT, "n": 2, "stream": stream, "logit_bias": {"9999": 1}})
        assert refused[:2] == (400, "invalid_request_body")


LIMITS = {
    "a queue for one": AdmissionConfig(max_in_flight=1, max_queue_depth=1),
    "short timeout": AdmissionConfig(max_in_flight=1, max_wait_secs=0.01),
}


@pytest.mark.parametrize("limits", LIMITS)
async def test_rejected_later_answers_of_a_request_are_retried_until_admitted(limits: str) -> None:
    async def script(request: Generate, say: Say) -> None:
        say(tokens=TOKENIZER.encode("x"))
        while request.id == 1 and not refused():  # noqa: ASYNC110 -- until a later run has been rejected
            await asyncio.sleep(0.001)
        say(tokens=[END], finish="stop", timing=TIMING)

    def refused() -> int:
        load = node.model.admission.load("m")
        return load.rejected_queue_full + load.rejected_timeout + load.rejected_anon_yield

    async with serve(script) as node:
        node.model.admission = Admission(LIMITS[limits], node.engine)
        assert len((await complete(node, "/v1/completions", n=4))["choices"]) == 4
        assert node.engine.open_streams == 0


async def test_request_fails_if_the_model_closes_before_all_its_answers_are_admitted() -> None:
    async def script(request: Generate, say: Say) -> None:
        node.model.admission.close(service_unavailable("it goes away", 1))
        say(tokens=TOKENIZER.encode("x"))
        say(tokens=[END], finish="stop", timing=TIMING)

    async with serve(script) as node:
        assert (await node.error("/v1/completions", {**TEXT, "n": 4}))[0] == 503
        assert node.engine.open_streams == 0


async def test_request_with_an_unusable_grammar_is_a_400() -> None:
    async with serve(lambda request, say: fail(say)) as node:
        assert await node.error("/v1/completions", {**TEXT}) == (400, "invalid_grammar", "it is too large")


async def fail(say: Say) -> None:
    say(finish="error", error="it is too large", bad_grammar=True)


async def test_disconnect_of_the_client_cancels_all_answers_of_the_request() -> None:
    async def script(request: Generate, say: Say) -> None:
        say(tokens=TOKENIZER.encode("x"))
        await asyncio.Event().wait()

    async with serve(script) as node:
        request = {**TEXT, "n": 2, "stream": True}
        async with node.http.post(f"{node.url}/v1/completions", json=request) as response:
            while len(node.engine.requests) < 2:
                await response.content.readline()
        await node.engine.cancelled.wait()
        while node.engine.open_streams:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# --- log-probabilities


@pytest.mark.parametrize(("top", "alternatives"), [(None, []), (0, []), (1, [" "]), (2, [" ", None])])
async def test_chat_answer_has_log_probabilities_of_each_token(top: int | None, alternatives: list[str | None]) -> None:
    fields = {"logprobs": True, "top_logprobs": top}
    async with serve(likely) as node:
        (choice,) = (await complete(node, "/v1/chat/completions", **fields))["choices"]
        data = await node.events("/v1/chat/completions", {**CHAT, **fields})
    content = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == "aé b" == choice["message"]["content"]
    assert [token["logprob"] for token in content] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    for token in content:
        expected = [token["token"] if name is None else name for name in alternatives]
        assert [other["token"] for other in token["top_logprobs"]] == expected
    streamed = [
        token
        for event in data[:-2]
        for choice in json.loads(event)["choices"]
        for token in (choice.get("logprobs") or {}).get("content", [])
    ]
    assert streamed == content


async def test_text_completion_has_log_probabilities_of_each_token() -> None:
    async with serve(likely) as node:
        (choice,) = (await complete(node, "/v1/completions", logprobs=1))["choices"]
        data = await node.events("/v1/completions", {**TEXT, "logprobs": 1})
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", " ", "b"]
    assert logprobs["token_logprobs"] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["top_logprobs"][0] == {"a": -1.0, " ": -0.5} and logprobs["top_logprobs"][3] == {" ": -0.5}
    pieces = [c["logprobs"] for event in data[:-2] for c in json.loads(event)["choices"] if c["logprobs"]]
    assert {name: [one for token in pieces for one in token[name]] for name in logprobs} == logprobs


@pytest.mark.parametrize("logprobs", [None, False])
async def test_answer_has_no_log_probabilities_unless_requested(logprobs: object) -> None:
    async with serve(answer("x")) as node:
        (choice,) = (await complete(node, "/v1/completions", logprobs=logprobs))["choices"]
        assert choice["logprobs"] is None
        assert node.engine.requests[0].sampling.logprobs is None


async def test_log_probabilities_exclude_reasoning_and_tool_calls() -> None:
    async def script(request: Generate, say: Say) -> None:
        for token in TOKENIZER.encode('Hm.</think>\n\nYes, <tool_call>\n{"name": "f", "arguments": {}}</tool_call>'):
            say(tokens=[token], logprobs=[(-1.0, [])])
            await asyncio.sleep(0)
        say(tokens=[END], logprobs=[(-1.0, [])], finish="stop", timing=TIMING)

    tools = [{"type": "function", "function": {"name": "f"}}]
    async with serve(script, AGENT_TEMPLATE) as node:
        fields = {"logprobs": True, "enable_thinking": True, "tools": tools}
        (choice,) = (await complete(node, "/v1/chat/completions", **fields))["choices"]
        assert "".join(token["token"] for token in choice["logprobs"]["content"]) == "Yes, "
        (choice,) = (await complete(node, "/v1/chat/completions", **fields, stop=[", "]))["choices"]
        assert "".join(token["token"] for token in choice["logprobs"]["content"]) == "Yes"


async def test_log_probabilities_that_the_engine_omits_are_an_error() -> None:
    async with serve(answer("x")) as node:
        assert (await node.error("/v1/completions", {**TEXT, "logprobs": 1}))[0] == 500


# --- echo


@pytest.mark.parametrize("prompt", ["Grüße", TOKENIZER.encode("Grüße")])
async def test_option_echo_returns_the_prompt_before_each_completion(prompt: object) -> None:
    async with serve(answer(" upon")) as node:
        reply = await complete(node, "/v1/completions", prompt=prompt, echo=True, n=2)
        assert [choice["text"] for choice in reply["choices"]] == ["Grüße upon"] * 2
        data = await node.events("/v1/completions", {**TEXT, "prompt": prompt, "echo": True, "n": 2})
        assert texts(data) == {0: "Grüße upon", 1: "Grüße upon"}


async def test_request_for_too_many_log_probabilities_is_rejected() -> None:
    fields = {**CHAT, "logprobs": True, "top_logprobs": 20, "n": 16, "max_tokens": 8192}
    async with serve(answer("x"), context=1 << 14) as node:
        status, code, message = await node.error("/v1/chat/completions", fields)
        assert (status, code) == (400, "unsupported_parameter") and "'logprobs'" in message
        assert not node.engine.requests
        assert (await node.post("/v1/chat/completions", {**fields, "logprobs": False, "top_logprobs": 0}))[0] == 200
