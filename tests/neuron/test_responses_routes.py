"""`/v1/responses` over a real socket, with the real client, in front of a scripted engine."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from openai.types.responses import Response as OpenAIResponse
from starlette.requests import Request
from starlette.routing import Route

from helexa.core.wire.responses.request import ResponsesRequest
from helexa.neuron.config import ResponsesConfig
from helexa.neuron.events import (
    Finished,
    InferenceEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from helexa.neuron.routes import reply
from helexa.neuron.routes.projectors.response_projector import ResponseProjector
from helexa.neuron.routes.reply import Reply
from neuron import openai_strict
from neuron.scripted_engine import AGENT_TEMPLATE, MODEL, TOKENIZER, answer, endless, failing
from neuron.scripted_node import Node, serve

ASK: dict[str, Any] = {"model": MODEL, "input": "hi"}
ANNA = {"x-helexa-account-id": "acme", "x-helexa-key-id": "anna"}
BERT = {"x-helexa-account-id": "acme", "x-helexa-key-id": "bert"}


async def whole(node: Node, **fields: Any) -> OpenAIResponse:
    """An answer that is not streamed, checked."""
    async with node.http.post(f"{node.url}/v1/responses", json=ASK | fields) as response:
        body = await response.read()
        assert response.status == 200, body
    return openai_strict.response(body)


async def streamed_events(node: Node, **fields: Any) -> list[Any]:
    """The events of a stream, checked."""
    return [openai_strict.event(data) for data in await node.events("/v1/responses", ASK | fields)]


def prompts(node: Node) -> list[str]:
    """What the engine was asked, as text."""
    return [TOKENIZER.decode(sent.prompt, skip_special=False) for sent in node.engine.requests]


@pytest.fixture
async def node() -> AsyncGenerator[Node, None]:
    async with serve(answer("Grüße 🦊")) as node:
        yield node


async def refused(asking: Any) -> tuple[int, str | None, str | None]:
    """Status, code and parameter of what the client raises."""
    with pytest.raises(openai.APIStatusError) as error:
        await asking
    return error.value.status_code, error.value.code, error.value.param


async def test_an_answer_is_a_response(node: Node) -> None:
    response = await whole(node, instructions="be brief", max_output_tokens=64, seed=3)
    assert (response.output_text, response.status, response.model) == ("Grüße 🦊", "completed", MODEL)
    assert prompts(node) == [
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ]
    (sent,) = node.engine.requests
    assert (sent.max_tokens, sent.sampling.seed) == (64, 3)
    assert response.usage is not None
    assert response.usage.input_tokens == len(sent.prompt)
    assert response.usage.output_tokens == len("Grüße 🦊".encode()) + 1


async def test_a_stream_is_the_same_response(node: Node) -> None:
    events = await streamed_events(node)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    response = await whole(node)
    assert "".join(deltas) == response.output_text
    assert not any("\ufffd" in delta for delta in deltas)
    assert events[-1].type == "response.completed"
    assert events[-1].response.usage == response.usage


async def test_the_real_client_reads_both(node: Node) -> None:
    response = await node.openai.responses.create(model=MODEL, input="hi")
    assert response.output_text == "Grüße 🦊"
    async with node.openai.responses.stream(model=MODEL, input="hi") as stream:
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
        assert (await stream.get_final_response()).output_text == text == "Grüße 🦊"


async def test_the_real_client_reads_reasoning_and_calls() -> None:
    """Its own reading of a stream checks that items begin, go on and end as they must."""
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

    async def route(request: Request) -> Reply:
        parsed = ResponsesRequest.parse(await request.body())
        return Reply(run(), ResponseProjector(MODEL, parsed), stream=bool(parsed.stream))

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


async def test_a_cut_answer_is_incomplete() -> None:
    async with serve(answer("on and on", finish="length")) as node:
        whole_response = await whole(node)
        *_, last = await streamed_events(node)
    assert last.type == "response.incomplete"
    for response in (whole_response, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"


async def test_a_failure_in_a_stream_is_its_end_and_otherwise_an_error() -> None:
    async with serve(failing("so far", "the engine ended")) as node:
        *_, error, last = await streamed_events(node)
        assert (error.type, last.type, last.response.error.message) == ("error", "response.failed", "the engine ended")
        assert (await refused(node.openai.responses.create(model=MODEL, input="hi")))[0] == 500


async def test_a_silent_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "KEEP_ALIVE_SECONDS", 0.01)
    async with (
        serve(endless("")) as node,
        node.http.post(f"{node.url}/v1/responses", json=ASK | {"stream": True}) as response,
    ):
        while not (await response.content.readline()).startswith(b": "):
            pass


async def test_a_hang_up_frees_the_engine() -> None:
    async with serve(endless("hello")) as node:
        async with node.http.post(f"{node.url}/v1/responses", json=ASK | {"stream": True}) as response:
            await response.content.readline()
            response.close()
        await node.engine.cancelled.wait()


async def test_refusals_have_names(node: Node) -> None:
    create = node.openai.responses.create
    tool: Any = {"type": "code_interpreter"}
    assert await refused(create(model="no", input="x")) == (404, "model_not_found", "model")
    assert await refused(create(model=MODEL, input="x", tools=[tool])) == (400, "unsupported_parameter", "tools")
    assert await refused(create(model=MODEL, input="x", background=True)) == (
        400,
        "unsupported_parameter",
        "background",
    )
    assert not node.engine.requests


# Reasoning and tools

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALLED = 'hm</think>\n\nAdding.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_model_thinks_speaks_and_calls(streamed: bool) -> None:
    fields: Any = {"tools": [ADD], "reasoning": {"effort": "low"}}
    async with serve(answer(CALLED), AGENT_TEMPLATE) as node:
        response: Any = (
            (await streamed_events(node, **fields))[-1].response if streamed else await whole(node, **fields)
        )
        (prompt,) = prompts(node)
    assert prompt.endswith("<think>\n")
    assert '"description":"Adds two numbers."' in prompt.replace('": ', '":')
    thought, message, call = response.output
    assert (thought.summary[0].text, message.content[0].text) == ("hm", "Adding.\n")
    assert (call.name, json.loads(call.arguments), call.status) == ("add", {"a": 1, "b": 2}, "completed")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("hm</think>")


async def test_thinking_is_the_templates_own_unless_the_client_says() -> None:
    async with serve(answer("x"), AGENT_TEMPLATE + "{% if enable_thinking is defined %}said{% endif %}") as node:
        await whole(node)
        await whole(node, reasoning={"effort": "none"})
        await whole(node, reasoning={"effort": "high"})
        silent, off, on = prompts(node)
    assert silent.endswith("assistant\n")
    assert off.endswith("assistant\nsaid")
    assert on.endswith("<think>\nsaid")


async def test_a_call_is_answered_in_the_next_response() -> None:
    async with serve(answer(CALLED), AGENT_TEMPLATE) as node:
        first = await whole(node, tools=[ADD], reasoning={"effort": "low"})
        call = first.output[-1]
        assert call.type == "function_call"
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        await whole(node, input=[output], previous_response_id=first.id, tools=[ADD])
        *_, prompt = prompts(node)
    assert "Adding.\n<tool_call>\na=1;b=2;</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>" in prompt


async def test_an_item_that_was_kept_may_be_named() -> None:
    """As some clients do in place of `previous_response_id`."""

    def named(*items: Any) -> list[Any]:
        return [{"type": "item_reference", "id": item.id} for item in items]

    user = {"role": "user", "content": "hi"}
    async with serve(answer(CALLED), AGENT_TEMPLATE) as node:
        first = await whole(node, tools=[ADD], reasoning={"effort": "low"})
        _, _, call = first.output
        assert call.type == "function_call"
        output = {"type": "function_call_output", "call_id": call.call_id, "output": {"sum": 3}}
        second = await whole(node, input=[user, *named(*first.output), output], tools=[ADD])
        await whole(node, input="go on", previous_response_id=second.id, tools=[ADD])
        _, *later = prompts(node)
    for prompt in later:
        assert "Adding.\n<tool_call>\na=1;b=2;</tool_call><|im_end|>" in prompt
        assert '<|im_start|>tool\n{"sum":3}<|im_end|>' in prompt


async def test_an_item_that_is_not_there_cannot_be_named(node: Node) -> None:
    create = node.openai.responses.create
    given = await create(model=MODEL, input="hi", extra_headers=ANNA)
    (item,) = given.output
    assert item.id
    stem, _ = item.id.rsplit("_", 1)
    for id, headers in ((item.id, BERT), (f"{stem}_7", ANNA), ("msg_x", ANNA), ("", ANNA)):
        asking = create(model=MODEL, input=[{"type": "item_reference", "id": id}], extra_headers=headers)
        assert await refused(asking) == (400, "item_not_found", "input.0")
    async with serve(answer("x"), kept=ResponsesConfig(store_mb=0)) as other:
        asking = other.openai.responses.create(model=MODEL, input=[{"type": "item_reference", "id": item.id}])
        assert await refused(asking) == (400, "unsupported_parameter", "input.0")


AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}


async def test_a_text_is_held_to_its_format() -> None:
    fields: Any = {"text": {"format": {"type": "json_schema", "name": "a", "schema": AGE}}}
    async with serve(answer('{"age": 7}'), AGENT_TEMPLATE) as node:
        await whole(node)
        response = await whole(node, **fields, reasoning={"effort": "none"})
        await whole(node, text={"format": {"type": "json_object"}})
        plain, schema, some = [sent.grammar for sent in node.engine.requests]
    assert plain == "" and '"age"' in schema and some not in (plain, schema)
    assert response.text is not None and response.text.format is not None
    assert (response.text.format.type, response.output_text) == ("json_schema", '{"age": 7}')


async def test_a_call_can_be_forced() -> None:
    choices: list[Any] = ["auto", "required", {"type": "function", "name": "add"}]
    async with serve(answer("x"), AGENT_TEMPLATE) as node:
        responses = [await whole(node, tools=[ADD], tool_choice=choice) for choice in choices]
        auto, *forced = [sent.grammar for sent in node.engine.requests]
    assert auto == "" and all("add" in grammar for grammar in forced)
    assert responses[1].tool_choice == "required"


async def test_a_format_that_cannot_be_had_says_where(node: Node) -> None:
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}
    status, _, param = await refused(node.openai.responses.create(model=MODEL, input="x", text={"format": schema}))  # type: ignore[arg-type]
    assert (status, (param or "").startswith("text.format")) == (400, True)


# What is kept


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_conversation_goes_on_from_a_response(node: Node, streamed: bool) -> None:
    instructions = {"instructions": "be brief"}
    if streamed:
        first = (await streamed_events(node, **instructions))[-1].response
    else:
        first = await whole(node, **instructions)
    second = await whole(node, input="and now?", previous_response_id=first.id)
    third = await whole(node, input="then?", previous_response_id=second.id)
    assert second.previous_response_id == first.id
    turn = "<|im_start|>{}\n{}<|im_end|>\n".format
    so_far = turn("user", "hi") + turn("assistant", "Grüße 🦊") + turn("user", "and now?")
    answer = "<|im_start|>assistant\n"
    assert prompts(node)[1:] == [
        so_far + answer,
        so_far + turn("assistant", "Grüße 🦊") + turn("user", "then?") + answer,
    ]
    assert third.status == "completed"


async def test_a_response_can_be_had_again_and_be_forgotten(node: Node) -> None:
    given = await node.openai.responses.create(model=MODEL, input="hi", metadata={"a": "b"})
    assert given.to_dict()["store"] is True
    assert (await node.openai.responses.retrieve(given.id)).to_dict() == given.to_dict()
    await node.openai.responses.delete(given.id)
    assert await refused(node.openai.responses.retrieve(given.id)) == (404, "response_not_found", "response_id")
    assert await refused(node.openai.responses.delete(given.id)) == (404, "response_not_found", "response_id")
    again = node.openai.responses.create(model=MODEL, input="hi", previous_response_id=given.id)
    assert await refused(again) == (400, "previous_response_not_found", "previous_response_id")


async def test_nobody_finds_what_is_somebody_elses(node: Node) -> None:
    openai = node.openai.responses
    given = await openai.create(model=MODEL, input="secret", extra_headers=ANNA)
    for stranger in (BERT, {}):
        again = openai.create(model=MODEL, input="hi", previous_response_id=given.id, extra_headers=stranger)
        assert await refused(again) == (400, "previous_response_not_found", "previous_response_id")
        assert (await refused(openai.retrieve(given.id, extra_headers=stranger)))[0] == 404
        assert (await refused(openai.delete(given.id, extra_headers=stranger)))[0] == 404
    assert (await openai.retrieve(given.id, extra_headers=ANNA)).id == given.id


async def test_what_is_not_to_be_kept_is_not(node: Node) -> None:
    given = await node.openai.responses.create(model=MODEL, input="hi", store=False)
    assert given.to_dict()["store"] is False
    assert (await refused(node.openai.responses.retrieve(given.id)))[0] == 404


async def test_a_response_that_was_not_read_to_its_end_is_not_kept() -> None:
    async with serve(endless("hello")) as node:
        async with node.openai.responses.stream(model=MODEL, input="hi") as stream:
            created: Any = await anext(stream)
        await node.engine.cancelled.wait()
        assert (await refused(node.openai.responses.retrieve(created.response.id)))[0] == 404


async def test_a_node_that_keeps_nothing_says_so() -> None:
    async with serve(answer("x"), kept=ResponsesConfig(store_mb=0)) as node:
        create = node.openai.responses.create
        given = await create(model=MODEL, input="hi")
        assert given.to_dict()["store"] is False
        for fields in ({"store": True}, {"previous_response_id": given.id}):
            (name,) = fields
            assert await refused(create(model=MODEL, input="hi", **fields)) == (400, "unsupported_parameter", name)  # type: ignore[arg-type]
        assert (await refused(node.openai.responses.retrieve(given.id)))[0] == 404


async def test_what_is_kept_is_not_streamed(node: Node) -> None:
    given = await node.openai.responses.create(model=MODEL, input="hi")
    asking = node.openai.responses.retrieve(given.id, stream=True)
    assert await refused(asking) == (400, "unsupported_parameter", "stream")
