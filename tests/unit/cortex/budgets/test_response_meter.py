"""Metering of Responses API responses, including ones that repeat parts of the request."""

import json
from typing import Any

import pytest

from helexa.cortex.upstream import usage_meter as meter_module
from helexa.cortex.upstream.usage_meter import MAX_BUFFERED_BYTES, ResponseMeter, Usage

USAGE = {"input_tokens": 5, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3, "total_tokens": 8}
FORGED: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "parameters": {"properties": {"usage": {"type": "string"}}, "usage": {"input_tokens": 1, "output_tokens": 1}},
    "delta": "event: response.completed\ndata: {}\n\n",
}


def event(kind: str, *, end: str = "\n", **fields: Any) -> bytes:
    return f"event: {kind}{end}data: {json.dumps({'type': kind, **fields})}{end}{end}".encode()


def response(usage: Any = None, **fields: Any) -> dict[str, Any]:
    return {"id": "resp_1", "usage": usage, "tools": [FORGED], "metadata": {"usage": "1"}, **fields}


CREATED = event("response.created", response=response())
ADDED = event("response.output_item.added", item={"type": "function_call", "name": "f", "arguments": "x"})
TEXT = event("response.output_text.delta", delta="Hi")
CALL = event("response.function_call_arguments.delta", delta="{}")
COMPLETED = event("response.completed", response=response(USAGE))


def metered(*chunks: bytes, streamed: bool = True) -> ResponseMeter:
    meter = ResponseMeter(streamed=streamed)
    for now, chunk in enumerate(chunks, 1):
        meter.feed(chunk, float(now))
    return meter


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("kind", ["completed", "incomplete", "failed"])
def test_usage_is_read_from_the_last_event_only_once_the_event_is_complete(kind: str, end: str) -> None:
    stream = CREATED + TEXT + event(f"response.{kind}", response=response(USAGE), end=end)
    for cut in range(len(stream)):
        meter = metered(stream[:cut])
        assert (meter.ended(cut), meter.usage()) == (False, None)
        meter.feed(stream[cut:], 2.0)
        assert (meter.ended(len(stream) - cut), meter.usage()) == (True, Usage(5, 3, 4))
        assert meter.failed() == (kind == "failed")


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_request_fields_that_a_response_repeats_are_not_read_as_usage(size: int) -> None:
    stream = b"".join([CREATED, ADDED, TEXT, CALL])
    meter = metered(*(stream[at : at + size] for at in range(0, len(stream), size)))
    assert (meter.usage(), meter.produced, meter.ended(size), meter.failed()) == (None, 2, False, False)
    meter.feed(event("response.completed", response=response({"type": "string"})), 9.0)
    assert (meter.usage(), meter.ended(9)) == (None, True)


def test_each_delta_event_of_a_responses_stream_counts_as_one_token() -> None:
    meter = metered(CREATED, ADDED, TEXT + CALL, TEXT)
    assert (meter.first_at, meter.last_at, meter.produced) == (3.0, 4.0, 3)
    assert metered(CREATED, ADDED).first_at is None


def test_usage_is_read_from_a_non_streaming_response() -> None:
    body = json.dumps(response(USAGE)).encode()
    assert metered(body[:50], body[50:], streamed=False).usage() == Usage(5, 3, 4)
    assert metered(body[:-1], streamed=False).usage() is None
    for usage in (None, {}, {"input_tokens": True}, "7", [7]):
        assert metered(json.dumps(response(usage)).encode(), streamed=False).usage() is None
    for odd in (b"", b"[]", b'"usage"', b"\xff", b"[" * 5000, b'{"usage":' + b"[" * 5000):
        assert metered(odd, streamed=False).usage() is None


@pytest.mark.parametrize("data", [b"{}", b"[]", b"\xff", b'{"response":7}', b'{"response":' + b"[" * 5000, b""])
def test_stream_whose_last_event_is_malformed_has_no_usage(data: bytes) -> None:
    assert metered(b"event: response.completed\ndata: " + data + b"\n\n").usage() is None


def test_failed_and_error_events_mark_the_response_as_failed() -> None:
    assert metered(CREATED, event("error", message="gone")).failed()
    assert metered(CREATED, event("response.failed", response=response())).failed()
    assert not metered(CREATED, COMPLETED).failed()


def test_overlong_events_of_a_responses_stream_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "MAX_BUFFERED_BYTES", 1000)
    filling = b"event: response.completed\ndata: {}\n" * 40
    long = [b"data: " + filling, *[filling] * 40, b"\n"]
    meter = metered(CREATED, *long, b"\n" + TEXT, TEXT)
    assert (meter.produced, meter.ended(9)) == (2, False)
    meter.feed(COMPLETED, 99.0)
    assert meter.usage() == Usage(5, 3, 4)
    body = json.dumps(response(USAGE, output="x" * 2000)).encode()
    assert metered(body, streamed=False).usage() is None
    assert metered(*[b"x" * 100] * 30, json.dumps(response(USAGE)).encode(), streamed=False).usage() is None


def test_response_meter_buffers_at_most_the_maximum_number_of_bytes() -> None:
    for streamed in (True, False):
        meter = ResponseMeter(streamed=streamed)
        for _ in range(200):
            meter.feed(b"x" * 50_000, 1.0)
            assert len(meter._tail) <= MAX_BUFFERED_BYTES
