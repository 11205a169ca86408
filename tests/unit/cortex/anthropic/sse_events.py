"""Parsing of event streams with Anthropic's client library, and checks of the event order."""

from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from helexa.core.sse import EventParser
from helexa.cortex.anthropic.reply import MessageStream

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def parsed(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream without pings. Each event is validated with the client's types."""
    assert stream.endswith(b"\n\n")
    parsed_events = []
    for event in EventParser().feed(stream):
        content = TypeAdapter(dict[str, Any]).validate_json(event.data)
        assert content["type"] == event.event
        if event.event == "error":
            assert content["error"].keys() == {"type", "message"}
        elif event.event == "ping":
            assert content == {"type": "ping"}
            continue
        else:
            EVENTS.validate_json(event.data)
        parsed_events.append(content)
    return parsed_events


def check_order(events: list[dict[str, Any]]) -> None:
    """Assert that the events form one message with blocks in sequence, or end with an error."""
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start" and kinds.count("message_start") == 1
    assert kinds[-1] in ("message_stop", "error")
    assert kinds.count("message_stop") + kinds.count("error") == 1
    if kinds[-1] == "message_stop":
        assert kinds[-2] == "message_delta"
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") > 0
    open_block, next_index = None, 0
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert (open_block, event["index"]) == (None, next_index)
                open_block, next_index = event["content_block"]["type"], next_index + 1
            case "content_block_delta":
                assert event["index"] == next_index - 1
                expected = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "thinking"}
                assert expected.get(event["delta"]["type"], "tool_use") == open_block
            case "content_block_stop":
                assert open_block is not None and event["index"] == next_index - 1
                open_block = None
            case "message_delta":
                assert open_block is None
            case _:
                pass


def message(stream: bytes) -> Message:
    """Return the message that the client accumulates from a successful stream."""
    events = parsed(stream)
    check_order(events)
    assert events[-1]["type"] == "message_stop", events[-1]
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        snapshot = accumulate_event(event=EVENTS.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
    return Message.model_validate(snapshot.to_dict())


def failure(stream: bytes) -> dict[str, Any]:
    """Return the error of a failed stream."""
    events = parsed(stream)
    check_order(events)
    assert events[-1]["type"] == "error"
    return events[-1]["error"]


def translated(*chunks: bytes, **options: Any) -> bytes:
    """Return the Messages API stream that the gateway makes from a node's `chunks`."""
    stream = MessageStream("small", "msg_1", input_tokens=11, request_id="req_1", **options)
    return b"".join([stream.feed(chunk) for chunk in chunks]) + stream.finish()
