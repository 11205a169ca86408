"""Conversion of backends' streams, without a socket."""

import json
from typing import Any

import pytest
from emulator.quirk import DONE, call, chunk, delta, finish, usage_chunk
from emulator.table import QUIRKS
from hypothesis import given
from hypothesis import strategies as st

from cortex.backends.any_chunk import CHUNK
from helexa.core.errors import ApiError
from helexa.cortex.backends import completion_choice as choices
from helexa.cortex.backends import stream as stream_module
from helexa.cortex.backends.completion import convert_completion
from helexa.cortex.backends.completion_choice import Choice
from helexa.cortex.backends.stream import MAX_CHOICES, BackendStream

STREAMS = [quirk for quirk in QUIRKS.values() if quirk.stream and not quirk.media_type]


def converted(*pieces: bytes, legacy: bool = False, chat: bool = True) -> tuple[list[Any], BackendStream]:
    """Return the chunks of the converted stream; `[DONE]` is the text itself."""
    stream = BackendStream(lambda: Choice(lambda _id: False, legacy=legacy), model="m", chat=chat)
    out = b"".join([stream.feed(piece) for piece in pieces]) + stream.finish()
    lines = [line[6:] for line in out.decode().split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines], stream


def without_new_ids(chunks: list[Any]) -> list[Any]:
    """Return the chunks without the ids that the gateway creates at random."""
    text = [value if isinstance(value, str) else {**value, "id": None, "created": None} for value in chunks]
    for value in text:
        for choice in value["choices"] if isinstance(value, dict) else ():
            for tool_call in choice["delta"].get("tool_calls") or ():
                tool_call.pop("id", None)
    return text


@given(st.sampled_from(STREAMS), st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_converted_backend_stream_does_not_depend_on_the_sizes_of_reads(quirk: Any, sizes: list[int]) -> None:
    stream = b"".join(quirk.stream)
    pieces, at = [], 0
    while at < len(stream):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream[at : at + size])
        at += size
    whole, expected = converted(stream)
    split, actual = converted(*pieces)
    assert without_new_ids(split) == without_new_ids(whole)
    assert str(actual.failure) == str(expected.failure)


@given(st.lists(CHUNK, max_size=4), st.booleans())
def test_any_event_of_a_backend_is_converted_or_an_error(chunks: list[Any], chat: bool) -> None:
    events = [b"data: " + json.dumps(value).encode() + b"\n\n" for value in chunks]
    sent, stream = converted(*events, DONE, chat=chat)
    assert stream.failure is not None or sent[-1] == "[DONE]"
    for value in sent:
        if value == "[DONE]":
            continue
        assert isinstance(value["choices"], list)
        for choice in value["choices"]:
            assert type(choice["index"]) is int
            delta = choice["delta"] if chat else {}
            assert isinstance(delta.get("content"), str | None)
            for tool_call in delta.get("tool_calls") or ():
                assert type(tool_call["index"]) is int
                assert isinstance(tool_call["function"].get("arguments", ""), str)


@given(CHUNK, st.booleans())
def test_any_non_streaming_answer_of_a_backend_is_converted_or_an_error(body: Any, chat: bool) -> None:
    try:
        value = json.loads(convert_completion(json.dumps(body).encode(), lambda: Choice(lambda _id: False), chat=chat))
    except ApiError:
        return
    for choice in value["choices"]:
        assert isinstance(choice["finish_reason"], str)
        if chat:
            assert isinstance(choice["message"]["content"], str | None)
            for tool_call in choice["message"].get("tool_calls") or ():
                assert tool_call["id"] and isinstance(tool_call["function"]["arguments"], str)


def test_well_formed_chunks_of_a_backend_keep_their_bytes() -> None:
    pieces = [delta(role="assistant", content=""), delta(content="é"), finish(), DONE]
    stream = BackendStream(lambda: Choice(lambda _id: False), model="m", chat=True)
    assert b"".join([stream.feed(piece) for piece in pieces]) == b"".join(pieces)


def test_text_of_a_backend_chunk_is_returned_before_the_next_chunk_arrives() -> None:
    stream = BackendStream(lambda: Choice(lambda _id: False), model="m", chat=True)
    assert stream.feed(delta(content="a")) == delta(content="a")
    assert stream.feed(finish()) == b""
    assert b'"finish_reason": "stop"' in stream.feed(DONE)


def test_converted_stream_gives_each_choice_its_own_finish_reason() -> None:
    def part(index: int, **fields: Any) -> bytes:
        return chunk({"index": index, "delta": {}, **fields})

    chunks, stream = converted(
        part(1, delta={"content": "b"}),
        part(0, delta={"content": "a"}),
        part(0, finish_reason="length"),
        part(1, delta={"content": "c"}),
        part(1, finish_reason="stop"),
        DONE,
    )
    assert stream.failure is None
    ends = {c["index"]: c["finish_reason"] for value in chunks[:-1] for c in value["choices"] if c["finish_reason"]}
    assert ends == {0: "length", 1: "stop"}


def test_stream_with_a_choice_that_has_no_finish_reason_is_incomplete() -> None:
    _, stream = converted(delta(content="a"), chunk({"index": 1, "delta": {"content": "b"}}), finish(), DONE)
    assert stream.failure is not None and "finish reason" in str(stream.failure)


def test_backend_stream_with_too_many_choices_is_an_error() -> None:
    _, stream = converted(*(chunk({"index": index, "delta": {}}) for index in range(MAX_CHOICES + 1)))
    assert stream.failure is not None and "choices" in str(stream.failure)


def test_client_that_sent_functions_gets_a_function_call() -> None:
    chunks, _ = converted(
        delta(function_call={"name": "f", "arguments": "{}"}), finish("function_call"), DONE, legacy=True
    )
    assert chunks[0]["choices"][0]["delta"]["function_call"] == {"name": "f", "arguments": "{}"}
    assert chunks[1]["choices"][0]["finish_reason"] == "function_call"


def test_text_completion_stream_gets_a_finish_reason_and_usage_like_a_chat() -> None:
    texts = [chunk({"text": text, "finish_reason": None}, object="text_completion") for text in ("Hel", "lo")]
    last = chunk({"text": "", "finish_reason": "MAX_TOKENS"}, object="text_completion")
    counts = usage_chunk({"input_tokens": 7, "output_tokens": 2}, choices=None)
    chunks, stream = converted(*texts, last, counts, DONE, chat=False)
    assert stream.failure is None
    assert "".join(value["choices"][0]["text"] for value in chunks[:3]) == "Hello"
    assert chunks[2]["choices"][0]["finish_reason"] == "length"
    assert (chunks[3]["choices"], chunks[3]["usage"]["prompt_tokens"]) == ([], 7)
    _, cut = converted(*texts, DONE, chat=False)
    assert cut.failure is not None


@pytest.mark.parametrize("extra", [{"citations": ["a"]}, {"system_fingerprint": "fp"}, {"usage": None}])
def test_converted_stream_keeps_unknown_fields_of_the_backend(extra: dict[str, Any]) -> None:
    chunks, _ = converted(chunk({"delta": {"content": "a", "annotations": [1]}}, **extra), finish(), DONE)
    assert chunks[0].items() >= extra.items()
    assert chunks[0]["choices"][0]["delta"]["annotations"] == [1]


def test_reasoning_and_refusal_that_are_no_text_are_dropped() -> None:
    odd = delta(content="a", reasoning={"a": 1}, reasoning_content=[1], refusal=7, thinking="Hm")
    chunks, _ = converted(odd, finish(), DONE)
    assert chunks[0]["choices"][0]["delta"] == {"content": "a", "reasoning_content": "Hm"}


def test_unknown_fields_of_a_tool_call_are_kept() -> None:
    signature = {"google": {"thought_signature": "x"}}
    first = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}, "extra_content": signature}
    chunks, _ = converted(delta(tool_calls=[first]), finish("tool_calls"), DONE)
    assert chunks[0]["choices"][0]["delta"]["tool_calls"][0]["extra_content"] == signature


def test_interleaved_tool_calls_of_a_backend_stay_apart() -> None:
    chunks, _ = converted(
        call(0, "f", '{"a":', "x"),
        call(1, "g", '{"b":', "y"),
        call(0, None, "1}"),
        call(1, None, "2}"),
        *(finish(), DONE),
    )
    arguments = {0: "", 1: ""}
    for value in chunks[:4]:
        (tool_call,) = value["choices"][0]["delta"]["tool_calls"]
        arguments[tool_call["index"]] += tool_call["function"]["arguments"]
    assert arguments == {0: '{"a":1}', 1: '{"b":2}'}


def test_backend_stream_with_too_many_tool_calls_is_an_error() -> None:
    _, stream = converted(*(call(None, f"f{index}", "{}") for index in range(choices.MAX_CALLS + 1)), finish(), DONE)
    assert stream.failure is not None and "tool calls" in str(stream.failure)


def test_repeated_tool_name_begins_no_new_call_beyond_the_limit_of_completeness_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choices, "MAX_CHECKS", 2)
    pieces = ['{"a": "', *["}"] * 20, '"}']
    chunks, stream = converted(*(call(0, "f", piece) for piece in pieces), finish("tool_calls"), DONE)
    assert stream.failure is None
    deltas = [value["choices"][0]["delta"]["tool_calls"][0] for value in chunks[:-2]]
    assert {value["index"] for value in deltas} == {0}
    assert "".join(value["function"]["arguments"] for value in deltas) == "".join(pieces)


def test_backend_event_with_too_many_lines_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_LINES", 3)
    _, stream = converted(b"data: {\n" * 4)
    assert stream.failure is not None and "lines" in str(stream.failure)
