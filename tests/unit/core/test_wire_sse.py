import pytest

from helexa.core import sse
from helexa.core.sse import DONE, KEEP_ALIVE, EventParser, ServerSentEvent, frame

STREAM = (
    "\ufeff: hello\r\n\r\n"
    'data: {"a":"🦊"}\n\n'
    "event: ping\rdata:no space\r\r"
    "id: 7\nretry: 10\ndata: first\ndata:  second\ndata\n\n"
    "event: nothing\n\n"
    "data: [DONE]\r\n\r\n"
    "data: never ended\n"
).encode()

EVENTS = [
    ServerSentEvent('{"a":"🦊"}'),
    ServerSentEvent("no space", "ping"),
    ServerSentEvent("first\n second\n"),
    ServerSentEvent("[DONE]"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_parsed_sse_events_do_not_depend_on_the_sizes_of_reads(size: int) -> None:
    parser = EventParser()
    events = [event for start in range(0, len(STREAM), size) for event in parser.feed(STREAM[start : start + size])]
    assert events == EVENTS


def test_empty_reads_do_not_change_the_parsed_sse_events() -> None:
    parser = EventParser()
    assert parser.feed(b"data: x\r") == []
    assert parser.feed(b"") == []
    assert parser.feed(b"\n\r\n") == [ServerSentEvent("x")]


def test_sse_events_written_by_the_server_are_parsed_back_unchanged() -> None:
    parser = EventParser()
    stream = KEEP_ALIVE + frame(b'{"x":1}') + KEEP_ALIVE + frame(b"{}", event="ping") + DONE
    assert parser.feed(stream) == [
        ServerSentEvent('{"x":1}'),
        ServerSentEvent("{}", "ping"),
        ServerSentEvent("[DONE]"),
    ]


@pytest.mark.parametrize("chunk", [b"x" * 64, b"data: xxxxxxxx\n" * 8, b": xxxxxxx" * 9, b"data:\n" * 30])
def test_single_event_over_the_size_limit_is_rejected(chunk: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    with pytest.raises(ValueError, match="an event of more than 100 bytes"):
        for _ in range(4):
            parser.feed(chunk)


def test_many_small_events_together_above_the_size_limit_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    assert sum(len(parser.feed(b": note\ndata: x\n\n")) for _ in range(100)) == 100


def test_invalid_utf8_in_an_event_is_replaced() -> None:
    assert EventParser().feed(b"data: \xff\n\n") == [ServerSentEvent("\ufffd")]
