"""The compliance cases of Open Responses, with a scripted engine."""

import json
from typing import Any

import jsonschema
import openai
import pytest

from neuron.scripted_engine import AGENT_TEMPLATE, MODEL, TOKENIZER, answer
from neuron.scripted_node import serve
from open_responses import CASES, Case, message, specification

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Sofia"}}\n</tool_call>'


async def reply_to(case: Case, output: str, **fields: Any) -> tuple[int, Any]:
    """Return the status and the body, or the data of the events, from a node whose model generates `output`."""
    async with serve(answer(output), AGENT_TEMPLATE) as node:
        body = {"model": MODEL, **case.body, **fields}
        return (200, await node.events(case.path, body)) if case.stream else await node.post(case.path, body)


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not case.vision],
    ids=lambda case: case.name,
)
async def test_response_complies_with_the_open_responses_specification(case: Case) -> None:
    status, reply = await reply_to(case, CALL if "function_call" in case.items else "It is 4.")
    assert status in case.statuses, reply
    if status != 200:
        assert reply["error"]["param"] == "model"
    elif case.stream:
        specification().check_stream(reply, case)
    else:
        specification().check_response(reply, case)


async def test_image_in_a_responses_request_is_rejected_by_a_model_without_vision() -> None:
    status, reply = await reply_to(case_named("image-input"), "A dot.")
    assert (status, reply["error"]["code"]) == (400, "vision_unsupported")


def test_message_item_with_the_field_phase_matches_the_schema_of_the_specification() -> None:
    content = [{"type": "output_text", "text": "Four.", "annotations": [], "logprobs": []}]
    item = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": content}
    specification().check("ItemField", {**item, "phase": "final_answer"})
    with pytest.raises(jsonschema.ValidationError):
        specification().check("ItemField", {**item, "status": None})


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_calls_reasoning_and_logprobs_match_the_specification(stream: bool) -> None:
    case = Case("all", {"input": "hi", "tools": [{"type": "function", "name": "get_weather"}]}, stream=stream)
    status, reply = await reply_to(case, f"<think>hm</think>I look.{CALL}", reasoning={"effort": "low"})
    assert status == 200
    check = specification().check_stream if stream else specification().check_response
    check(reply, Case("all", {}, items=("reasoning", "message", "function_call")))


async def test_response_repeats_the_request_parameters_with_their_types() -> None:
    parameters = {"frequency_penalty": 0.5, "top_p": 0.25, "safety_identifier": "s", "prompt_cache_key": "k"}
    status, reply = await reply_to(case_named("basic-response"), "Hi", **parameters, service_tier="auto")
    assert status == 200
    assert {name: reply[name] for name in parameters} == parameters
    assert (reply["temperature"], reply["presence_penalty"], reply["service_tier"]) == (0.7, 0.0, "default")
    assert reply["completed_at"] >= reply["created_at"] and reply["max_tool_calls"] is None


async def test_response_repeats_the_json_schema_of_the_requested_text_format() -> None:
    text_format = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    status, reply = await reply_to(case_named("basic-response"), "{}", text={"format": text_format})
    assert status == 200, json.dumps(reply)
    assert reply["text"]["format"] == {**text_format, "description": None, "strict": True}


async def test_result_of_compact_is_accepted_as_input_of_the_next_response() -> None:
    case = case_named("compact-response")
    async with serve(answer("They launch on Tuesday.")) as node:
        body = {"model": MODEL, **case.body}
        _, compaction = await node.post(case.path, body)
        request = {"model": MODEL, "input": [*compaction["output"], message("user", "When?")]}
        assert (await node.post("/v1/responses", request))[0] == 200
        summarized, answered = (TOKENIZER.decode(sent.prompt, skip_special=False) for sent in node.engine.requests)
        assert (await node.error(case.path, {"model": MODEL}))[1] == "invalid_request_body"
        request["input"][0]["encrypted_content"] = "theirs"
        assert "compact" in (await node.error("/v1/responses", request))[2]
    assert "We launch on Tuesday, after telling support." in summarized and "Summarize this" in summarized
    assert answered == (
        "<|im_start|>system\nSummary of the conversation so far:\nThey launch on Tuesday.<|im_end|>\n"
        "<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_stored_response_can_be_compacted() -> None:
    async with serve(answer("Hello Ada.")) as node:
        _, first = await node.post("/v1/responses", {"model": MODEL, "input": "I am Ada."})
        request = {"model": MODEL, "previous_response_id": first["id"], "input": None}
        status, compaction = await node.post("/v1/responses/compact", request)
        sent = TOKENIZER.decode(node.engine.requests[-1].prompt, skip_special=False)
    assert status == 200 and "I am Ada." in sent and "Hello Ada." in sent
    specification().check_response(compaction, case_named("compact-response"))


@pytest.mark.parametrize("fields", [{}, {"instructions": "Be brief.", "tools": [{"type": "function", "name": "f"}]}])
async def test_input_tokens_endpoint_counts_as_many_tokens_as_the_usage_of_the_response(fields: dict[str, Any]) -> None:
    async with serve(answer("Hi"), AGENT_TEMPLATE) as node:
        request = {"model": MODEL, "input": "Grüße", **fields}
        counted = await node.post("/v1/responses/input_tokens", request)
        _, reply = await node.post("/v1/responses", request)
        assert counted == (200, {"object": "response.input_tokens", "input_tokens": reply["usage"]["input_tokens"]})
        assert len(node.engine.requests) == 1
        assert (await node.error("/v1/responses/input_tokens", {"model": MODEL}))[0] == 400


async def test_openai_client_lists_the_input_items_of_a_response() -> None:
    async with serve(answer("4")) as node:
        first = await node.openai.responses.create(model=MODEL, input="2+2?")
        second = await node.openai.responses.create(
            model=MODEL,
            previous_response_id=first.id,
            input=[{"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]}],
        )
        items = node.openai.responses.input_items
        oldest = [item async for item in await items.list(second.id, order="asc", limit=1)]
        newest = (await items.list(second.id, limit=2)).data
        counted = await node.openai.responses.input_tokens.count(model=MODEL, input="2+2?")
        with pytest.raises(openai.BadRequestError, match="limit: must be"):
            await items.list(second.id, limit=0)
        with pytest.raises(openai.BadRequestError, match="no item 'x'"):
            await items.list(second.id, after="x")
        with pytest.raises(openai.NotFoundError):
            await items.list("resp_none")
    assert [item.content[0].text for item in oldest] == ["2+2?", "4", "Sure?"]  # type: ignore[union-attr]
    assert [item.id for item in newest] == [item.id for item in oldest[:0:-1]]
    assert len({item.id for item in oldest}) == 3
    assert first.usage is not None and counted.input_tokens == first.usage.input_tokens
