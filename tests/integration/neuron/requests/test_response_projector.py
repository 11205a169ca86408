"""Projection of a run's events to the Responses API, validated with OpenAI's types."""

import json
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from helexa.core.errors import ApiError, overloaded, service_unavailable
from helexa.core.sse import EventParser
from helexa.core.wire.responses_input import chat_messages
from helexa.core.wire.responses_request import ResponsesRequest
from helexa.neuron.output_events import (
    Failed,
    Finished,
    InferenceEvent,
    OutputEvent,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
)
from helexa.neuron.routes.responses import Keep, ResponseProjector
from neuron import openai_strict

REQUEST = ResponsesRequest.parse(b'{"model": "m", "input": "hi", "metadata": {"a": "b"}, "temperature": 0.5}')
END = Finished(
    reason="stop",
    prompt_tokens=20,
    cached_tokens=16,
    completion_tokens=9,
    prefill_ms=1.0,
    decode_ms=2.0,
    reasoning_tokens=4,
)
CUT = Finished(reason="length", prompt_tokens=20, cached_tokens=0, completion_tokens=9, prefill_ms=1.0, decode_ms=2.0)

THINK = [ReasoningDelta("let me "), ReasoningDelta("see")]
SAY = [TextDelta("Grüße "), TextDelta('🦊\n"')]
CALL = [ToolCallStart(0, "call_a", "f"), ToolCallDelta(0, '{"x": '), ToolCallDelta(0, "1}")]
OTHER = [ToolCallStart(1, "call_b", "g"), ToolCallDelta(1, "{}")]


def projector(keep: Keep | None = None, request: ResponsesRequest = REQUEST) -> ResponseProjector:
    return ResponseProjector("m", request, keep, temperature=0.5, stem="0", created=7)


def run(*outputs: Sequence[OutputEvent] | OutputEvent, end: Finished | Failed = END) -> list[InferenceEvent]:
    events: list[InferenceEvent] = [Started(prompt_tokens=20)]
    for output in outputs:
        events += output if isinstance(output, Sequence) else [output]
    return [*events, end]


def stream(events: Sequence[InferenceEvent]) -> list[Any]:
    """Return the validated events of a stream."""
    rendering = projector()
    frames = EventParser().feed(b"".join([rendering.frames(event) for event in events]))
    assert [frame.event for frame in frames] == [json.loads(frame.data)["type"] for frame in frames]
    read = [openai_strict.event(frame.data) for frame in frames]
    assert [event.sequence_number for event in read] == list(range(len(read)))
    return read


def body(events: Sequence[InferenceEvent], rendering: ResponseProjector | None = None) -> bytes:
    """Return the body of a complete response."""
    rendering = rendering or projector()
    for event in events:
        rendering.take(event)
    return rendering.body()


def complete_response(events: Sequence[InferenceEvent]) -> Response:
    return openai_strict.response(body(events))


def kinds(events: Sequence[Any]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


def test_streamed_response_has_begin_and_end_events_for_each_output_item() -> None:
    assert kinds(stream(run(THINK, SAY, CALL, OTHER))) == [
        *("created", "in_progress"),
        *("output_item.added", "reasoning_summary_part.added"),
        *("reasoning_summary_text.delta", "reasoning_summary_text.delta"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]


def test_response_contains_reasoning_messages_and_function_calls() -> None:
    read = complete_response(run(THINK, SAY, CALL, OTHER))
    assert [item.to_dict() for item in read.output] == [
        {
            "id": "rs_0_0",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "let me see"}],
            "status": "completed",
        },
        {
            "id": "msg_0_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "annotations": [], "logprobs": [], "text": 'Grüße 🦊\n"'}],
        },
        {
            "id": "fc_0_2",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_a",
            "name": "f",
            "arguments": '{"x": 1}',
        },
        {
            "id": "fc_0_3",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_b",
            "name": "g",
            "arguments": "{}",
        },
    ]
    assert (read.id, read.created_at, read.model, read.status) == ("resp_0", 7, "m", "completed")
    assert (read.metadata, read.temperature, read.tool_choice, read.tools) == ({"a": "b"}, 0.5, "auto", [])
    assert (read.error, read.incomplete_details, read.output_text) == (None, None, 'Grüße 🦊\n"')


def test_usage_of_a_response_counts_cached_and_reasoning_tokens() -> None:
    usage = complete_response(run(SAY)).usage
    assert usage is not None
    assert usage.to_dict() == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 29,
        "helexa_timing": {"prefill_ms": 1, "decode_ms": 2, "prefill_tokens": 4},
    }


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [SAY],
        [THINK],
        [THINK, SAY],
        [CALL],
        [SAY, CALL, TextDelta("after")],
        [THINK, CALL, ReasoningDelta("again"), OTHER, SAY],
    ],
    ids=["nothing", "text", "thought", "both", "a call", "text after a call", "thought between calls"],
)
@pytest.mark.parametrize("end", [END, CUT], ids=["ended", "cut"])
def test_streamed_response_equals_complete_response(outputs: list[list[OutputEvent]], end: Finished) -> None:
    events = run(*outputs, end=end)
    sent = stream(events)
    streamed, entire = sent[-1].response.to_dict(), complete_response(events).to_dict()
    assert type(streamed.pop("completed_at")) is type(entire.pop("completed_at"))  # the values may differ by a second
    assert streamed == entire
    done = [event for event in sent if event.type == "response.output_item.done"]
    assert [event.item.to_dict() for event in done] == [item.to_dict() for item in sent[-1].response.output]
    assert [event.output_index for event in done] == list(range(len(done)))


_OUTPUTS = st.one_of(
    st.text(min_size=1, max_size=4).map(TextDelta),
    st.text(min_size=1, max_size=4).map(ReasoningDelta),
    st.lists(st.text(min_size=1, max_size=4), max_size=3),
)


@given(st.lists(_OUTPUTS, max_size=8), st.sampled_from([END, CUT, Failed(service_unavailable("gone", 1))]))
def test_events_of_a_streamed_response_contain_all_output_exactly_once(
    outputs: list[Any], end: Finished | Failed
) -> None:
    events: list[OutputEvent] = []
    calls = 0
    for output in outputs:
        if isinstance(output, list):
            events.append(ToolCallStart(calls, f"call_{calls}", "f"))
            events += [ToolCallDelta(calls, piece) for piece in output]
            calls += 1
        else:
            events.append(output)
    sent = stream(run(events, end=end))
    deltas: dict[str, str] = {}
    for event in sent:
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
    whole_texts: dict[str, str] = {}
    for item in sent[-1].response.output:
        match item.type:
            case "message":
                whole_texts[item.id] = item.content[0].text
            case "reasoning":
                whole_texts[item.id] = item.summary[0].text
            case _:
                whole_texts[item.id] = item.arguments
    assert deltas == {id: text for id, text in whole_texts.items() if text}
    for kind, marker in ((TextDelta, "msg"), (ReasoningDelta, "rs")):
        said_so = "".join(event.text for event in events if isinstance(event, kind))
        assert "".join(text for id, text in whole_texts.items() if id.startswith(marker)) == said_so


def test_response_cut_off_at_max_output_tokens_has_the_status_incomplete() -> None:
    sent = stream(run(SAY, end=CUT))
    assert sent[-1].type == "response.incomplete"
    response = sent[-1].response
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in response.output] == ["incomplete"]


def test_only_the_last_item_of_a_truncated_response_is_incomplete() -> None:
    assert [item.status for item in complete_response(run(THINK, CALL, SAY, end=CUT)).output] == [  # type: ignore[union-attr]
        "completed",
        "completed",
        "incomplete",
    ]


@pytest.mark.parametrize("arguments", ['{"x": ', "", "[]", '"x"'])
@pytest.mark.parametrize("end", [END, CUT])
def test_function_call_whose_arguments_are_not_a_json_object_is_incomplete(arguments: str, end: Finished) -> None:
    deltas = [ToolCallDelta(0, arguments)] if arguments else []
    (call,) = complete_response(run(ToolCallStart(0, "call_a", "f"), deltas, end=end)).output
    assert call.type == "function_call"
    assert (call.status, call.arguments) == ("incomplete", arguments)


def test_finished_tool_call_in_a_truncated_response_is_complete() -> None:
    (call,) = complete_response(run(CALL, end=CUT)).output
    assert call.type == "function_call" and call.status == "completed"


@pytest.mark.parametrize("end", [END, CUT])
@pytest.mark.parametrize("outputs", [[], THINK], ids=["nothing", "thought"])
def test_response_without_text_contains_an_empty_message(outputs: list[OutputEvent], end: Finished) -> None:
    response = complete_response(run(outputs, end=end))
    assert response.output[-1].type == "message"
    assert response.output_text == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (service_unavailable("the engine ended", 2), "server_error"),
        (overloaded("too many", 1), "rate_limit_exceeded"),
        (ApiError(500, None, "who knows"), "server_error"),
    ],
)
def test_failure_is_streamed_as_an_error_event_and_a_failed_response(error: ApiError, code: str) -> None:
    *_, error_event, failed = stream(run(SAY, end=Failed(error)))
    assert (error_event.type, error_event.code, error_event.message) == ("error", error.code, str(error))
    assert failed.type == "response.failed"
    assert (failed.response.status, failed.response.error.code) == ("failed", code)
    assert failed.response.error.message == str(error)
    assert [(item.status, item.content[0].text) for item in failed.response.output] == [("incomplete", 'Grüße 🦊\n"')]
    assert failed.response.usage is None


def test_log_probabilities_are_in_text_deltas_and_in_the_message() -> None:
    likely = TokenLogprob("é", "é".encode(), -0.5, (("é", "é".encode(), -0.5), ("e", b"e", -1.0)))
    events = run(TextDelta("é", (likely,)), TextDelta("!"))
    deltas = [event for event in stream(events) if event.type == "response.output_text.delta"]
    assert [[one.token for one in delta.logprobs] for delta in deltas] == [["é"], []]
    message = complete_response(events).output[0]
    assert message.type == "message" and message.content[0].type == "output_text"
    (one,) = message.content[0].logprobs or []
    assert (one.bytes, one.logprob) == ([195, 169], -0.5)
    assert [(top.token, top.bytes, top.logprob) for top in one.top_logprobs] == [
        ("é", [195, 169], -0.5),
        ("e", [101], -1.0),
    ]


@pytest.mark.parametrize("streamed", [True, False])
def test_stored_response_equals_the_response_that_was_sent(streamed: bool) -> None:
    stored: list[tuple[str, bytes, list[dict[str, Any]]]] = []
    rendering = projector(lambda *response: stored.append(response))
    events = run(SAY, CALL)
    if streamed:
        for event in events[:-1]:
            rendering.frames(event)
        assert not stored
        rendering.frames(events[-1])
    else:
        body(events, rendering)
    ((id, stored_body, items),) = stored
    assert id == "resp_0"
    assert stored_body == body(events, projector(lambda *_: None))
    assert json.loads(orjson.dumps(items)) == json.loads(stored_body)["output"]


def test_failed_response_is_not_stored() -> None:
    stored: list[Any] = []
    rendering = projector(lambda *response: stored.append(response))
    for event in run(SAY, end=Failed(service_unavailable("gone", 1))):
        rendering.frames(event)
    assert not stored


def test_two_responses_to_equal_requests_have_different_ids() -> None:
    assert ResponseProjector("m", REQUEST).id != ResponseProjector("m", REQUEST).id


def test_function_call_contains_the_namespace_of_its_function() -> None:
    functions = [{"type": "function", "name": "f"}]
    tools = [{"type": "namespace", "name": "agents", "tools": functions}, {"type": "function", "name": "g"}]
    request = ResponsesRequest.parse(json.dumps({"model": "m", "input": "hi", "tools": tools}).encode())
    calls = openai_strict.response(body(run(CALL, OTHER), projector(request=request))).output
    names = [(call.name, call.namespace) for call in calls if call.type == "function_call"]
    assert names == [("f", "agents"), ("g", None)]


def test_output_items_sent_back_as_input_become_one_assistant_message() -> None:
    items = json.loads(body(run(THINK, SAY, CALL, OTHER)))["output"]
    (turn,) = chat_messages(None, items)
    assert (turn["reasoning_content"], turn["content"]) == ("let me see", [{"type": "text", "text": 'Grüße 🦊\n"'}])
    assert [(call["id"], call["function"]) for call in turn["tool_calls"]] == [
        ("call_a", {"name": "f", "arguments": '{"x": 1}'}),
        ("call_b", {"name": "g", "arguments": "{}"}),
    ]
