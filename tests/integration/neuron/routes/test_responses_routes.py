"""`/v1/responses` over a real socket, also with OpenAI's client, and with a scripted engine."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from openai.types.responses import Response as OpenAIResponse
from starlette.requests import Request
from starlette.routing import Route

from helexa.core.wire.responses_request import ResponsesRequest
from helexa.neuron.config import ResponsesConfig
from helexa.neuron.output_events import (
    Finished,
    InferenceEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from helexa.neuron.routes import replies_disconnects_and_errors
from helexa.neuron.routes.replies_disconnects_and_errors import RunResponse
from helexa.neuron.routes.responses import ResponseProjector
from neuron import openai_strict
from neuron.scripted_engine import AGENT_TEMPLATE, MODEL, TOKENIZER, answer, endless, failing
from neuron.scripted_node import Node, serve

ASK: dict[str, Any] = {"model": MODEL, "input": "hi"}
ANNA = {"x-helexa-account-id": "acme", "x-helexa-key-id": "anna"}
BERT = {"x-helexa-account-id": "acme", "x-helexa-key-id": "bert"}


async def complete_response(node: Node, **fields: Any) -> OpenAIResponse:
    """Return a validated response without streaming."""
    async with node.http.post(f"{node.url}/v1/responses", json=ASK | fields) as response:
        body = await response.read()
        assert response.status == 200, body
    return openai_strict.response(body)


async def streamed_events(node: Node, **fields: Any) -> list[Any]:
    """Return the validated events of a stream."""
    return [openai_strict.event(data) for data in await node.events("/v1/responses", ASK | fields)]


def prompts(node: Node) -> list[str]:
    """Return the prompts of all engine requests, as text."""
    return [TOKENIZER.decode(sent.prompt, skip_special=False) for sent in node.engine.requests]


@pytest.fixture
async def node() -> AsyncGenerator[Node, None]:
    async with serve(answer("Grüße 🦊")) as node:
        yield node


async def error_of(call: Any) -> tuple[int, str | None, str | None]:
    """Return the status, code and parameter of the error that OpenAI's client raises."""
    with pytest.raises(openai.APIStatusError) as error:
        await call
    return error.value.status_code, error.value.code, error.value.param


async def test_response_without_streaming_has_text_status_and_usage(node: Node) -> None:
    response = await complete_response(node, instructions="be brief", max_output_tokens=64, seed=3)
    assert (response.output_text, response.status, response.model) == ("Grüße 🦊", "completed", MODEL)
    assert prompts(node) == [
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ]
    (sent,) = node.engine.requests
    assert (sent.max_tokens, sent.sampling.seed) == (64, 3)
    assert response.usage is not None
    assert response.usage.input_tokens == len(sent.prompt)
    assert response.usage.output_tokens == len("Grüße 🦊".encode()) + 1


async def test_streamed_response_equals_complete_response(node: Node) -> None:
    events = await streamed_events(node)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    response = await complete_response(node)
    assert "".join(deltas) == response.output_text
    assert not any("\ufffd" in delta for delta in deltas)
    assert events[-1].type == "response.completed"
    assert events[-1].response.usage == response.usage


async def test_openai_client_reads_responses_and_streams(node: Node) -> None:
    response = await node.openai.responses.create(model=MODEL, input="hi")
    assert response.output_text == "Grüße 🦊"
    async with node.openai.responses.stream(model=MODEL, input="hi") as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        assert (await stream.get_final_response()).output_text == text == "Grüße 🦊"


async def test_openai_client_reads_reasoning_and_function_calls_of_responses() -> None:
    """The client checks the order of a stream's events itself."""
    events: list[InferenceEvent] = [
        Started(prompt_tokens=3),
        ReasoningDelta("hm"),
        TextDelta("I will"),
        ToolCallStart(0, "call_a", "f"),
        ToolCallDelta(0, '{"x":'),
        ToolCallDelta(0, "1}"),
        ToolCallStart(1, "call_b", "f"),
        ToolCallDelta(1, '{"x":2}'),
        Finished(
            reason="tool_calls",
            prompt_tokens=3,
            cached_tokens=0,
            completion_tokens=9,
            prefill_ms=1.0,
            decode_ms=1.0,
            reasoning_tokens=1,
        ),
    ]

    async def run() -> AsyncGenerator[InferenceEvent, None]:
        for event in events:
            yield event

    async def route(request: Request) -> RunResponse:
        parsed = ResponsesRequest.parse(await request.body())
        return RunResponse(run(), ResponseProjector(MODEL, parsed), stream=bool(parsed.stream))

    async with serve(answer(""), routes=[Route("/v1/responses", route, methods=["POST"])]) as node:
        async with node.openai.responses.stream(model=MODEL, input="hi") as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        whole_response = await node.openai.responses.create(model=MODEL, input="hi")
    for response in (final, whole_response):
        thought, message, *calls = response.output
        assert thought.type == "reasoning" and thought.summary[0].text == "hm"
        assert message.type == "message" and response.output_text == "I will"
        assert [(call.call_id, call.arguments) for call in calls if call.type == "function_call"] == [
            ("call_a", '{"x":1}'),
            ("call_b", '{"x":2}'),
        ]


async def test_response_cut_off_at_max_output_tokens_has_the_status_incomplete() -> None:
    async with serve(answer("on and on", finish="length")) as node:
        whole_response = await complete_response(node)
        *_, last = await streamed_events(node)
    assert last.type == "response.incomplete"
    for response in (whole_response, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"


async def test_engine_failure_is_a_failed_response_event_or_a_500_error() -> None:
    async with serve(failing("so far", "the engine ended")) as node:
        *_, error, last = await streamed_events(node)
        assert (error.type, last.type, last.response.error.message) == ("error", "response.failed", "the engine ended")
        assert (await error_of(node.openai.responses.create(model=MODEL, input="hi")))[0] == 500


async def test_stream_without_new_text_sends_keep_alive_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies_disconnects_and_errors, "KEEP_ALIVE_SECONDS", 0.01)
    async with (
        serve(endless("")) as node,
        node.http.post(f"{node.url}/v1/responses", json=ASK | {"stream": True}) as response,
    ):
        while not (await response.content.readline()).startswith(b": "):
            pass


async def test_disconnect_of_the_client_cancels_the_request_in_the_engine() -> None:
    async with serve(endless("hello")) as node:
        async with node.http.post(f"{node.url}/v1/responses", json=ASK | {"stream": True}) as response:
            await response.content.readline()
            response.close()
        await node.engine.cancelled.wait()


async def test_each_invalid_responses_request_gets_its_status_and_error_code(node: Node) -> None:
    create = node.openai.responses.create
    tool: Any = {"type": "code_interpreter"}
    assert await error_of(create(model="no", input="x")) == (404, "model_not_found", "model")
    assert await error_of(create(model=MODEL, input="x", tools=[tool])) == (400, "unsupported_parameter", "tools")
    assert await error_of(create(model=MODEL, input="x", background=True)) == (
        400,
        "unsupported_parameter",
        "background",
    )
    assert not node.engine.requests


# --- reasoning and tools

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALLED = 'hm</think>\n\nAdding.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.mark.parametrize("streamed", [True, False])
async def test_one_response_can_contain_reasoning_text_and_a_function_call(streamed: bool) -> None:
    fields: Any = {"tools": [ADD], "reasoning": {"effort": "low"}}
    async with serve(answer(CALLED), AGENT_TEMPLATE) as node:
        response: Any = (
            (await streamed_events(node, **fields))[-1].response
            if streamed
            else await complete_response(node, **fields)
        )
        (prompt,) = prompts(node)
    assert prompt.endswith("<think>\n")
    assert '"description":"Adds two numbers."' in prompt.replace('": ', '":')
    thought, message, call = response.output
    assert (thought.summary[0].text, message.content[0].text) == ("hm", "Adding.\n")
    assert (call.name, json.loads(call.arguments), call.status) == ("add", {"a": 1, "b": 2}, "completed")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("hm</think>")


async def test_chat_template_default_controls_reasoning_unless_the_request_sets_effort() -> None:
    async with serve(answer("x"), AGENT_TEMPLATE + "{% if enable_thinking is defined %}said{% endif %}") as node:
        await complete_response(node)
        await complete_response(node, reasoning={"effort": "none"})
        await complete_response(node, reasoning={"effort": "high"})
        silent, off, on = prompts(node)
    assert silent.endswith("assistant\n")
    assert off.endswith("assistant\nsaid")
    assert on.endswith("<think>\nsaid")


async def test_function_call_output_continues_the_previous_response() -> None:
    async with serve(answer(CALLED), AGENT_TEMPLATE) as node:
        first = await complete_response(node, tools=[ADD], reasoning={"effort": "low"})
        call = first.output[-1]
        assert call.type == "function_call"
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        await complete_response(node, input=[output], previous_response_id=first.id, tools=[ADD])
        *_, prompt = prompts(node)
    assert "Adding.\n<tool_call>\na=1;b=2;</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>" in prompt


async def test_output_item_of_a_stored_response_can_be_referenced_by_its_id() -> None:
    """Some clients use item references instead of `previous_response_id`."""

    def references(*items: Any) -> list[Any]:
        return [{"type": "item_reference", "id": item.id} for item in items]

    user = {"role": "user", "content": "hi"}
    async with serve(answer(CALLED), AGENT_TEMPLATE) as node:
        first = await complete_response(node, tools=[ADD], reasoning={"effort": "low"})
        _, _, call = first.output
        assert call.type == "function_call"
        output = {"type": "function_call_output", "call_id": call.call_id, "output": {"sum": 3}}
        second = await complete_response(node, input=[user, *references(*first.output), output], tools=[ADD])
        await complete_response(node, input="go on", previous_response_id=second.id, tools=[ADD])
        _, *later = prompts(node)
    for prompt in later:
        assert "Adding.\n<tool_call>\na=1;b=2;</tool_call><|im_end|>" in prompt
        assert '<|im_start|>tool\n{"sum":3}<|im_end|>' in prompt


async def test_reference_to_an_unknown_item_is_rejected(node: Node) -> None:
    create = node.openai.responses.create
    created = await create(model=MODEL, input="hi", extra_headers=ANNA)
    (item,) = created.output
    assert item.id
    stem, _ = item.id.rsplit("_", 1)
    for id, headers in ((item.id, BERT), (f"{stem}_7", ANNA), ("msg_x", ANNA), ("", ANNA)):
        call = create(model=MODEL, input=[{"type": "item_reference", "id": id}], extra_headers=headers)
        assert await error_of(call) == (400, "item_not_found", "input.0")
    async with serve(answer("x"), stored_responses=ResponsesConfig(store_mb=0)) as second_node:
        call = second_node.openai.responses.create(model=MODEL, input=[{"type": "item_reference", "id": item.id}])
        assert await error_of(call) == (400, "unsupported_parameter", "input.0")


AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}


async def test_json_schema_in_text_format_is_enforced() -> None:
    fields: Any = {"text": {"format": {"type": "json_schema", "name": "a", "schema": AGE}}}
    async with serve(answer('{"age": 7}'), AGENT_TEMPLATE) as node:
        await complete_response(node)
        response = await complete_response(node, **fields, reasoning={"effort": "none"})
        await complete_response(node, text={"format": {"type": "json_object"}})
        plain, schema, some = [sent.grammar for sent in node.engine.requests]
    assert plain == "" and '"age"' in schema and some not in (plain, schema)
    assert response.text is not None and response.text.format is not None
    assert (response.text.format.type, response.output_text) == ("json_schema", '{"age": 7}')


async def test_tool_choice_can_force_a_function_call() -> None:
    choices: list[Any] = ["auto", "required", {"type": "function", "name": "add"}]
    async with serve(answer("x"), AGENT_TEMPLATE) as node:
        responses = [await complete_response(node, tools=[ADD], tool_choice=choice) for choice in choices]
        auto, *forced = [sent.grammar for sent in node.engine.requests]
    assert auto == "" and all("add" in grammar for grammar in forced)
    assert responses[1].tool_choice == "required"


async def test_error_for_an_unsupported_text_format_names_the_parameter(node: Node) -> None:
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}
    status, _, param = await error_of(node.openai.responses.create(model=MODEL, input="x", text={"format": schema}))  # type: ignore[arg-type]
    assert (status, (param or "").startswith("text.format")) == (400, True)


# --- stored responses


@pytest.mark.parametrize("streamed", [True, False])
async def test_conversation_continues_from_a_stored_response(node: Node, streamed: bool) -> None:
    instructions = {"instructions": "be brief"}
    if streamed:
        first = (await streamed_events(node, **instructions))[-1].response
    else:
        first = await complete_response(node, **instructions)
    second = await complete_response(node, input="and now?", previous_response_id=first.id)
    third = await complete_response(node, input="then?", previous_response_id=second.id)
    assert second.previous_response_id == first.id
    turn = "<|im_start|>{}\n{}<|im_end|>\n".format
    so_far = turn("user", "hi") + turn("assistant", "Grüße 🦊") + turn("user", "and now?")
    answer = "<|im_start|>assistant\n"
    assert prompts(node)[1:] == [
        so_far + answer,
        so_far + turn("assistant", "Grüße 🦊") + turn("user", "then?") + answer,
    ]
    assert third.status == "completed"


async def test_response_can_be_retrieved_and_deleted(node: Node) -> None:
    created = await node.openai.responses.create(model=MODEL, input="hi", metadata={"a": "b"})
    assert created.to_dict()["store"] is True
    assert (await node.openai.responses.retrieve(created.id)).to_dict() == created.to_dict()
    await node.openai.responses.delete(created.id)
    assert await error_of(node.openai.responses.retrieve(created.id)) == (404, "response_not_found", "response_id")
    assert await error_of(node.openai.responses.delete(created.id)) == (404, "response_not_found", "response_id")
    again = node.openai.responses.create(model=MODEL, input="hi", previous_response_id=created.id)
    assert await error_of(again) == (400, "previous_response_not_found", "previous_response_id")


async def test_response_of_another_principal_is_not_found(node: Node) -> None:
    openai = node.openai.responses
    created = await openai.create(model=MODEL, input="secret", extra_headers=ANNA)
    for stranger in (BERT, {}):
        again = openai.create(model=MODEL, input="hi", previous_response_id=created.id, extra_headers=stranger)
        assert await error_of(again) == (400, "previous_response_not_found", "previous_response_id")
        assert (await error_of(openai.retrieve(created.id, extra_headers=stranger)))[0] == 404
        assert (await error_of(openai.delete(created.id, extra_headers=stranger)))[0] == 404
    assert (await openai.retrieve(created.id, extra_headers=ANNA)).id == created.id


async def test_response_with_store_false_is_not_stored(node: Node) -> None:
    created = await node.openai.responses.create(model=MODEL, input="hi", store=False)
    assert created.to_dict()["store"] is False
    assert (await error_of(node.openai.responses.retrieve(created.id)))[0] == 404


async def test_response_whose_client_disconnects_is_not_stored() -> None:
    async with serve(endless("hello")) as node:
        async with node.openai.responses.stream(model=MODEL, input="hi") as stream:
            created: Any = await anext(stream)
        await node.engine.cancelled.wait()
        assert (await error_of(node.openai.responses.retrieve(created.response.id)))[0] == 404


async def test_use_of_a_disabled_response_store_is_rejected() -> None:
    async with serve(answer("x"), stored_responses=ResponsesConfig(store_mb=0)) as node:
        create = node.openai.responses.create
        created = await create(model=MODEL, input="hi")
        assert created.to_dict()["store"] is False
        for fields in ({"store": True}, {"previous_response_id": created.id}):
            (name,) = fields
            assert await error_of(create(model=MODEL, input="hi", **fields)) == (400, "unsupported_parameter", name)  # type: ignore[arg-type]
        assert (await error_of(node.openai.responses.retrieve(created.id)))[0] == 404


async def test_stored_response_cannot_be_streamed(node: Node) -> None:
    created = await node.openai.responses.create(model=MODEL, input="hi")
    call = node.openai.responses.retrieve(created.id, stream=True)
    assert await error_of(call) == (400, "unsupported_parameter", "stream")
