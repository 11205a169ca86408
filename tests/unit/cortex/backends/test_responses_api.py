"""Conversion of chat completions to responses of the Responses API, without a socket."""

import json
from typing import Any

import pytest
from emulator import clients
from emulator.quirk import DONE, call, chunk, completion, counts, delta, finish, usage_chunk
from hypothesis import given
from hypothesis import strategies as st

from cortex.backends.any_chunk import CHUNK
from helexa.core.errors import ApiError
from helexa.core.sse import EventParser
from helexa.core.wire.responses_request import ResponsesRequest
from helexa.cortex.anthropic.reply import MessageStream
from helexa.cortex.backends import responses_api
from helexa.cortex.backends.answer import BackendAnswer
from helexa.cortex.backends.responses_api import ResponsesAnswer
from helexa.http.headers import Headers


class Chat:
    """A well-formed answer that arrives in `pieces`."""

    status = 200
    complete = True

    def __init__(self, *pieces: bytes) -> None:
        self.headers: Headers = [(b"content-type", b"text/event-stream")]
        self.closed = False
        self._pieces = list(pieces)

    async def chunk(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    def close(self) -> None:
        self.closed = True


async def converted(*pieces: bytes, **fields: Any) -> tuple[bytes, int]:
    """Return the converted body, and how often the token counts were estimated."""
    request = ResponsesRequest.parse(json.dumps({"model": "m", "input": "Hi", **fields}).encode())
    estimates: list[None] = []
    answer = ResponsesAnswer(
        Chat(*pieces), request, model="m", input_tokens=5, on_estimate=lambda: estimates.append(None)
    )
    body = b""
    while data := await answer.chunk():
        body += data
    return body, len(estimates)


CALLS = [
    call(0, "f", "", "c0"),
    call(1, "g", "", "c1"),
    call(1, None, '{"b": '),
    call(0, None, '{"a": 1'),
    call(1, None, "2}"),
    call(0, None, "}"),
    finish("tool_calls"),
    usage_chunk(counts()),
    DONE,
]


async def test_interleaved_tool_calls_become_response_items_one_after_the_other() -> None:
    body, estimates = await converted(*CALLS, stream=True)
    answer = clients.response_stream(body)
    assert answer.calls == [("f", {"a": 1}), ("g", {"b": 2})]
    assert (answer.ids, answer.usage, estimates) == (["c0", "c1"], (7, 2), 0)


async def test_text_after_an_incomplete_tool_call_is_not_lost() -> None:
    pieces = [call(0, "f", '{"a":', "c0"), delta(content="Well"), finish(), DONE]
    body, _ = await converted(*pieces, stream=True)
    events = [json.loads(line[6:]) for line in body.decode().split("\n") if line.startswith("data: ")]
    items = events[-1]["response"]["output"]
    assert [(item["type"], item["status"]) for item in items] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    assert items[1]["content"][0]["text"] == "Well"


async def test_text_between_the_pieces_of_a_tool_call_follows_the_call() -> None:
    begun = (call(0, "f", '{"a": 1', "c0"), delta(content="Wait."), delta(reasoning_content="Hm."))
    body, _ = await converted(*begun, call(0, None, "}"), finish("tool_calls"), DONE, stream=True)
    answer = clients.response_stream(body)
    assert (answer.calls, answer.text, answer.reasoning) == ([("f", {"a": 1})], "Wait.", "Hm.")


async def test_tool_call_that_continues_after_its_end_is_an_error() -> None:
    whole = (call(0, "f", '{"a": 1}', "c0"), delta(content="Wait."))
    body, _ = await converted(*whole, call(0, None, " "), finish("tool_calls"), DONE, stream=True)
    assert clients.response_stream(body).ids == ["c0"]
    with pytest.raises(ApiError, match="arrived after the end of the call"):
        await converted(*whole, call(0, None, "}"), finish("tool_calls"), DONE, stream=True)


@pytest.mark.parametrize("streamed", [True, False])
async def test_missing_token_counts_of_a_backend_are_replaced_by_estimates(streamed: bool) -> None:
    stream = [delta(content="Hel"), delta(content="lo"), finish("length"), DONE]
    pieces = stream if streamed else [completion({"content": "Hello"}, "length")]
    body, estimates = await converted(*pieces, stream=streamed)
    answer = clients.response_stream(body) if streamed else clients.response_whole(200, body)
    assert answer.usage is not None and answer.usage[0] == 5 and answer.usage[1] > 0
    assert (answer.text, answer.end, estimates) == ("Hello", "length", 1)


@pytest.mark.parametrize("reason", ["never heard of", None])
async def test_unknown_finish_reason_is_an_error(reason: str | None) -> None:
    with pytest.raises(ApiError, match="finish reason") as caught:
        await converted(completion({"content": "Hello"}, reason))
    assert caught.value.status == 502


async def test_keep_alives_are_forwarded_before_the_first_event() -> None:
    body, _ = await converted(b":\n\n", chunk({"delta": {"content": "a"}}), finish(), DONE, stream=True)
    assert body.startswith(b":\n\nevent: response.created\n")


async def test_too_much_output_behind_an_incomplete_tool_call_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_api, "MAX_WAITING_CHARS", 100)
    pieces = [call(0, "f", "{", "c0"), call(1, "g", "x" * 101, "c1")]
    with pytest.raises(ApiError, match="characters after an unfinished tool call"):
        await converted(*pieces, stream=True)


def backend_answer(chunks: list[Any]) -> BackendAnswer:
    events = [b"data: " + json.dumps(value).encode() + b"\n\n" for value in chunks]
    return BackendAnswer(Chat(*events, DONE), b":\n\n", model="m", chat=True, streamed=True, conversation=b"{}")


@given(st.lists(CHUNK, max_size=4))
async def test_any_events_of_a_backend_become_a_response_or_an_error(chunks: list[Any]) -> None:
    request = ResponsesRequest.parse(b'{"model": "m", "input": "Hi", "stream": true}')
    answer = ResponsesAnswer(backend_answer(chunks), request, model="m", input_tokens=5, on_estimate=lambda: None)
    body = b""
    try:
        while data := await answer.chunk():
            body += data
    except ApiError:
        return
    last = EventParser().feed(body)[-1]
    assert last.event in ("response.completed", "response.incomplete")


@given(st.lists(CHUNK, max_size=4))
async def test_any_events_of_a_backend_become_a_message_or_an_error(chunks: list[Any]) -> None:
    answer, stream, sent = backend_answer(chunks), MessageStream("m", "msg_1"), b""
    try:
        while data := await answer.chunk():
            sent += stream.feed(data)
    except ApiError as error:
        sent += stream.fail(error)
    sent += stream.finish()
    assert EventParser().feed(sent)[-1].event in ("message_stop", "error")
