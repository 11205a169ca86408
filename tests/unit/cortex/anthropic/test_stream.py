"""Translation of chat completion streams into Messages API events."""

import json
from typing import Any

import pytest

from cortex.anthropic import sse_events
from cortex.anthropic.openai_stream import (
    CACHED,
    DONE,
    FIRST,
    INTERLEAVED,
    KEEP_ALIVE,
    ROLE,
    SECOND,
    SEQUENTIAL,
    call_delta,
    call_deltas,
    calls,
    delta,
    event,
    finish,
    text_chunk,
    thinking_chunk,
    usage,
)
from cortex.anthropic.sse_events import translated
from helexa.core.errors import ApiError
from helexa.cortex.anthropic import stream_content_blocks
from helexa.cortex.anthropic.reply import PING, MessageStream


def types(stream: bytes) -> list[str]:
    return [event["type"] for event in sse_events.parsed(stream)]


def test_translated_text_stream_has_the_events_of_anthropics_api() -> None:
    stream = translated(ROLE, text_chunk("Hel"), text_chunk("lo é"), finish(), usage(7, 2, **CACHED), DONE)
    assert stream.decode() == (
        'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1","type":"message",'
        '"role":"assistant","model":"small","content":[],"stop_reason":null,"stop_sequence":null,"usage":'
        '{"input_tokens":11,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":0,'
        '"cache_creation":{"ephemeral_1h_input_tokens":0,"ephemeral_5m_input_tokens":0},'
        '"service_tier":"standard"}}}\n\n'
        'event: ping\ndata: {"type":"ping"}\n\n'
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":'
        '{"type":"text","text":"","citations":null}}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'
        '{"type":"text_delta","text":"Hel"}}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'
        '{"type":"text_delta","text":"lo é"}}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn",'
        '"stop_sequence":null},"usage":{"input_tokens":4,"cache_creation_input_tokens":0,'
        '"cache_read_input_tokens":3,"output_tokens":2,"output_tokens_details":{"thinking_tokens":1}}}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )


def test_anthropic_client_accumulates_the_message_from_the_stream() -> None:
    message = sse_events.message(
        translated(ROLE, text_chunk("Hel"), text_chunk("lo é"), finish(), usage(7, 2, **CACHED), DONE)
    )
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello é", "citations": None}]
    assert (message.id, message.model, message.stop_reason) == ("msg_1", "small", "end_turn")
    counts = message.usage
    assert (counts.input_tokens, counts.cache_read_input_tokens, counts.output_tokens) == (4, 3, 2)


def test_each_chunk_of_the_node_is_translated_at_once() -> None:
    stream = MessageStream("small", "msg_1")
    assert stream.feed(ROLE) == b""
    first = stream.feed(text_chunk("a"))
    assert b"message_start" in first and b'"text":"a"' in first
    first, remaining = text_chunk("b")[:20], text_chunk("b")[20:]
    assert stream.feed(first) == b""
    assert b'"text":"b"' in stream.feed(remaining)
    assert b'"partial_json":"{"' in stream.feed(calls(call_delta(0, "{", name="f", id="1")))
    assert b'"partial_json":"}"' in stream.feed(calls(call_delta(0, "}")))
    assert stream.feed(finish("tool_calls")) == b""
    assert stream.feed(DONE).endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert stream.feed(text_chunk("more")) == stream.finish() == stream.fail(ApiError(500, None, "late")) == b""
    assert stream.failure is None


def test_keep_alive_comments_become_pings() -> None:
    stream = MessageStream("small", "msg_1")
    assert stream.feed(KEEP_ALIVE) == PING
    assert stream.feed(KEEP_ALIVE[:5]) == b""
    assert stream.feed(KEEP_ALIVE[5:] + KEEP_ALIVE) == PING + PING


COUNTS = event({"choices": [], "helexa_prompt": {"prompt_tokens": 7, "cached_tokens": 3}})


@pytest.mark.parametrize("chunks_before", [[], [ROLE], [KEEP_ALIVE, ROLE, KEEP_ALIVE]])
def test_message_start_has_the_same_prompt_counts_as_the_last_event(chunks_before: list[bytes]) -> None:
    stream = MessageStream("small", "msg_1", input_tokens=11)
    assert b"message_start" not in b"".join(map(stream.feed, chunks_before))
    sent = stream.feed(COUNTS)
    start, sent = (
        sse_events.parsed(sent)[0],
        sent + stream.feed(text_chunk("x") + finish() + usage(7, 2, **CACHED) + DONE),
    )
    last: Any = sse_events.parsed(sent)[-2]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert [start["message"]["usage"][name] for name in names] == [last["usage"][name] for name in names] == [4, 3, 0]
    assert sse_events.message(sent).usage.output_tokens == 2


def test_usage_in_the_first_chunk_of_a_backend_gives_the_prompt_tokens_of_message_start() -> None:
    first = event({"choices": [{"index": 0, "delta": {"content": "x"}}], "usage": {"prompt_tokens": 9}})
    start: Any = sse_events.parsed(translated(ROLE, first, finish(), usage(9, 1), DONE))[0]
    assert (start["message"]["usage"]["input_tokens"], start["message"]["usage"]["output_tokens"]) == (9, 0)


def test_reasoning_is_streamed_as_a_separate_thinking_block() -> None:
    for name in ("reasoning_content", "reasoning"):
        deltas = [delta(**{name: text}) for text in ("Hm", ", yes")]
        message = sse_events.message(translated(ROLE, *deltas, text_chunk("Yes"), finish(), DONE))
        assert [block.to_dict() for block in message.content] == [
            {"type": "thinking", "thinking": "Hm, yes", "signature": "unsigned"},
            {"type": "text", "text": "Yes", "citations": None},
        ]
    order = types(translated(thinking_chunk("Hm"), text_chunk("Yes"), finish(), DONE))
    assert order[1:4] == ["content_block_start", "content_block_delta", "content_block_delta"]


def tool_uses(stream: bytes) -> list[tuple[str, str, Any]]:
    message = sse_events.message(stream)
    assert message.stop_reason == "tool_use"
    return [(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]


@pytest.mark.parametrize(
    "sent",
    [
        [calls(call_delta_) for call_delta_ in SEQUENTIAL],
        [calls(*SEQUENTIAL)],
        [calls(call_delta_) for call_delta_ in INTERLEAVED],
        [calls(call_delta_) for call_delta_ in [*call_deltas(None, FIRST), *call_deltas(None, SECOND)]],
        [calls(call_delta_) for call_delta_ in [*call_deltas(0, FIRST), *call_deltas(0, SECOND)]],
        [calls(call_delta(0, json.dumps(call[2]), name=call[1], id=call[0])) for call in (FIRST, SECOND)],
        [calls(call_delta(index, call[2], name=call[1], id=call[0])) for index, call in enumerate((FIRST, SECOND))],
        [
            calls(
                call_deltas(7, FIRST)[0],
                call_deltas(3, SECOND)[0],
                *call_deltas(7, FIRST)[1:],
                *call_deltas(3, SECOND)[1:],
            )
        ],
    ],
    ids=["in order", "at once", "mixed", "no index", "one index", "whole", "objects", "late"],
)
def test_interleaved_parallel_tool_calls_become_two_tool_use_blocks(sent: list[bytes]) -> None:
    assert tool_uses(translated(ROLE, text_chunk("Let me see."), *sent, finish("tool_calls"), DONE)) == [FIRST, SECOND]


def test_tool_call_is_kept_although_the_finish_reason_is_stop() -> None:
    assert tool_uses(
        translated(*[calls(call_delta_) for call_delta_ in call_deltas(0, FIRST)], finish("stop"), DONE)
    ) == [FIRST]


def test_tool_call_without_arguments_has_empty_input() -> None:
    sent = [calls(call_delta(0, "", name="now", id="1")), calls(call_delta(1, " ", name="here"))]
    first, second = tool_uses(translated(*sent, finish("tool_calls"), DONE))
    assert first == ("1", "now", {})
    assert second[0].startswith("toolu_") and second[1:] == ("here", {})


def test_tool_calls_without_an_id_get_ids_that_are_unique_over_answers() -> None:
    answer = (calls(call_delta(0, "{}", name="now")), finish("tool_calls"), DONE)
    assert len({tool_uses(translated(*answer))[0][0] for _ in range(3)}) == 3


def test_tool_call_with_invalid_arguments_becomes_text() -> None:
    garbage = calls(call_delta(0, "ls -l", name="Bash", id="1"))
    message = sse_events.message(translated(text_chunk("So:"), garbage, finish("tool_calls"), DONE))
    assert [block.type for block in message.content] == ["text", "text"]
    assert message.content[1].to_dict()["text"] == '{"name":"Bash","arguments":"ls -l"}'
    assert message.stop_reason == "end_turn"


def test_tool_arguments_that_are_json_encoded_twice_are_decoded() -> None:
    pieces = json.dumps('{"command": "ls"}').partition("ls")
    sent = [calls(call_delta(0, piece, name="Bash" if piece is pieces[0] else None)) for piece in pieces]
    ((_, name, tool_input),) = tool_uses(translated(*sent, finish("tool_calls"), DONE))
    assert (name, tool_input) == ("Bash", {"command": "ls"})


@pytest.mark.parametrize("reason", ["stop", "tool_calls"])
def test_truncated_tool_call_is_sent_before_the_buffered_content(reason: str) -> None:
    broken = calls(call_delta(0, '{"command": "l', name="Bash", id="1"))
    stream = translated(
        *[calls(call_delta_) for call_delta_ in call_deltas(7, SECOND)], broken, text_chunk("So."), finish(reason), DONE
    )
    message = sse_events.message(stream)
    assert [block.type for block in message.content] == ["tool_use", "tool_use", "text"]
    assert [block.to_dict().get("name") for block in message.content] == ["Read", "Bash", None]
    assert types(stream)[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert message.stop_reason == "end_turn"  # the client must not run the truncated call


def test_second_truncated_tool_call_becomes_text() -> None:
    first, second = calls(call_delta(0, '{"a": ', name="f", id="1")), calls(call_delta(1, '{"b": ', name="g", id="2"))
    content = sse_events.message(translated(first, second, finish(), DONE)).content
    assert [block.type for block in content] == ["tool_use", "text"]
    assert content[1].to_dict()["text"] == '{"name":"g","arguments":"{\\"b\\": "}'


def test_tool_call_that_continues_after_its_end_is_an_error() -> None:
    chunks = [calls(call_delta(0, "{}", name="f", id="1")), text_chunk("x"), calls(call_delta(0, "{}"))]
    assert sse_events.failure(translated(*chunks, finish("tool_calls"), DONE))["type"] == "api_error"


def test_tool_call_cut_off_by_length_has_stop_reason_max_tokens() -> None:
    message = sse_events.message(
        translated(calls(call_delta(0, '{"command": "l', name="Bash", id="1")), finish("length"), DONE)
    )
    assert message.stop_reason == "max_tokens"
    assert message.content[0].type == "tool_use"


def test_text_that_arrives_within_a_tool_call_is_sent_after_the_call() -> None:
    stream = translated(
        calls(call_delta(0, '{"a"', name="f", id="1")),
        text_chunk("between"),
        thinking_chunk("hm"),
        calls(call_delta(0, ":1}")),
        text_chunk("after"),
        finish("tool_calls"),
        DONE,
    )
    content = [block.to_dict() for block in sse_events.message(stream).content]
    assert [block["type"] for block in content] == ["tool_use", "text", "thinking", "text"]
    assert (content[0]["input"], content[1]["text"], content[3]["text"]) == ({"a": 1}, "between", "after")


def test_empty_completion_becomes_a_message_with_one_empty_text_block() -> None:
    message = sse_events.message(translated(ROLE, finish(), DONE))
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "", "citations": None}]


@pytest.mark.parametrize(
    ("reason", "fields", "expected"),
    [
        ("stop", {}, ("end_turn", None)),
        ("stop", {"stop_reason": "END"}, ("stop_sequence", "END")),
        ("stop", {"stop_reason": "never asked for"}, ("end_turn", None)),
        ("stop", {"stop_reason": 151645}, ("end_turn", None)),
        ("length", {}, ("max_tokens", None)),
        ("content_filter", {}, ("refusal", None)),
        ("tool_calls", {}, ("end_turn", None)),
    ],
)
def test_finish_reason_becomes_a_stop_reason_in_a_stream(
    reason: str, fields: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    message = sse_events.message(translated(text_chunk("x"), finish(reason, **fields), DONE, stop_sequences=["END"]))
    assert (message.stop_reason, message.stop_sequence) == expected


def test_only_numeric_timings_of_a_node_are_forwarded() -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    usage_chunk = usage(7, 2, helexa_timing={"prefill_ms": 41, "decode_ms": 3.5, "odd": deep, "text": "no"})
    ending: Any = sse_events.parsed(translated(text_chunk("x"), finish(), usage_chunk, DONE))[-2]
    assert ending["usage"]["helexa_timing"] == {"prefill_ms": 41, "decode_ms": 3.5}


def test_reason_of_a_cache_miss_is_forwarded_in_the_usage() -> None:
    miss = {"reason": "changed", "position": 700, "message": 1, "role": "user", "odd": {}}
    ending: Any = sse_events.parsed(translated(text_chunk("x"), finish(), usage(7, 2, helexa_cache_miss=miss), DONE))[
        -2
    ]
    del miss["odd"]
    assert ending["usage"]["helexa_cache_miss"] == miss


def test_stream_without_usage_gets_output_tokens_counted_by_the_gateway() -> None:
    message = sse_events.message(translated(text_chunk("a"), text_chunk("b"), finish(), DONE))
    assert (message.usage.input_tokens, message.usage.output_tokens) == (11, 2)


def test_token_counts_of_zero_from_a_backend_are_replaced_by_estimates() -> None:
    message = sse_events.message(translated(text_chunk("a"), text_chunk("b"), finish(), usage(0, 0), DONE))
    assert (message.usage.input_tokens, message.usage.output_tokens) == (11, 2)


def test_chat_stream_that_ends_without_done_is_complete() -> None:
    assert sse_events.message(translated(text_chunk("a"), finish(), usage(1, 1))).stop_reason == "end_turn"


# Failures


ENVELOPE = {"message": "the engine died", "type": "api_error", "code": None, "param": None}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ENVELOPE, {"type": "api_error", "message": "the engine died"}),
        (ENVELOPE | {"type": "rate_limit_error"}, {"type": "rate_limit_error", "message": "the engine died"}),
        ({"message": "out of memory"}, {"type": "api_error", "message": "out of memory"}),
        ("out of memory", {"type": "api_error", "message": "out of memory"}),
        (
            {"type": "exceed_context_size_error", "message": "no", "n_prompt_tokens": 9, "n_ctx": 5, "code": 400},
            {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 5 maximum"},
        ),
        ({"code": 500}, {"type": "api_error", "message": "upstream returned 500"}),
    ],
)
def test_error_chunk_of_the_node_ends_the_stream_with_an_error_event(error: Any, expected: dict[str, Any]) -> None:
    stream = translated(text_chunk("a"), event({"error": error}), text_chunk("b"), finish(), DONE)
    assert sse_events.failure(stream) == expected
    assert b'"text":"a"' in stream and b'"text":"b"' not in stream
    assert b'"request_id":"req_1"' in stream


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [ROLE],
        [text_chunk("a")],
        [text_chunk("a"), DONE],
        [text_chunk("a"), finish("abort"), DONE],
        [text_chunk("a")[:-10]],
        [b"data: {]\n\n"],
        [b"data: [1]\n\n"],
        [b"<html>502 Bad Gateway</html>"],
        [b"data: " + b"[" * 5000 + b"\n\n"],
        [b"data: \xff\xfe\n\n"],
    ],
)
def test_truncated_or_malformed_stream_is_an_error(chunks: list[bytes]) -> None:
    stream = MessageStream("small", "msg_1")
    sent = b"".join([stream.feed(chunk) for chunk in chunks]) + stream.finish()
    assert sse_events.failure(sent)["type"] == "api_error"
    assert stream.failure is not None and stream.failure.code == "upstream_malformed_response"


def test_error_of_the_gateway_is_the_last_event_of_the_stream() -> None:
    stream = MessageStream("small", "msg_1")
    sent = stream.feed(text_chunk("a")) + stream.fail(ApiError(529, None, "full")) + stream.finish()
    assert sse_events.failure(sent) == {"type": "overloaded_error", "message": "full"}


def test_tool_call_delta_without_contents_is_ignored() -> None:
    empty = [calls({"index": 0}), calls({"index": 0, "function": None}), calls({"index": 1, "function": {}})]
    (block,) = sse_events.message(translated(*empty, text_chunk("x"), finish(), DONE)).content
    assert block.to_dict()["text"] == "x"


def test_tool_arguments_nested_too_deeply_are_an_error() -> None:
    arguments: Any = {}
    for _ in range(300):
        arguments = {"a": arguments}
    assert "ecursion" in sse_events.failure(translated(calls(call_delta(0, arguments, name="f"))))["message"]


def test_stream_with_too_much_content_during_tool_calls_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_content_blocks, "MAX_BUFFERED_CHARS", 10_000)
    unfinished = calls(call_delta(0, '{"a": "', name="f", id="1"))
    assert (
        "characters in and after an unfinished tool call"
        in sse_events.failure(translated(unfinished, *[calls(call_delta(0, "x" * 99))] * 200))["message"]
    )
    assert (
        "characters in and after an unfinished tool call"
        in sse_events.failure(translated(unfinished, *[text_chunk("x" * 99)] * 200))["message"]
    )
    assert sse_events.message(translated(*[text_chunk("x" * 99), thinking_chunk("y" * 99)] * 200, finish(), DONE))
    assert (
        "have more than 1024 characters"
        in sse_events.failure(translated(calls(call_delta(0, "{}", name="f" * 2000))))["message"]
    )
    assert (
        "tool calls"
        in sse_events.failure(translated(calls(*[call_delta(n, "{}", name="f") for n in range(600)])))["message"]
    )
