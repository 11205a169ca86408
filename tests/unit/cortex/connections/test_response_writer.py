"""Forwarding of a response to the client, and usage metering of its bytes."""

from typing import Any

import pytest

from helexa.core.errors import ApiError
from helexa.cortex.forwarding.client_reply_and_error_events import MAX_BUFFERED_BYTES, Reply
from helexa.cortex.forwarding.request import parse_request
from helexa.cortex.request_record import RequestRecord
from helexa.cortex.upstream.usage_meter import Meter, Usage

ERROR = ApiError(502, "upstream_connection_error", "gone")
ENDING = b'data: {"error":{"message":"gone","type":"invalid_request_error","code":"upstream_connection_error",'
ENDING += b'"param":null}}\n\ndata: [DONE]\n\n'


class Sent(list[dict[str, Any]]):
    """An ASGI `send` that records its messages."""

    async def __call__(self, message: Any) -> None:
        self.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self)


async def streamed(*chunks: bytes) -> tuple[Sent, Reply]:
    sent = Sent()
    reply = Reply(sent)
    await reply.start(200, [], streamed=True)
    for chunk in chunks:
        await reply.write(chunk)
    return sent, reply


STREAM = b'data: {"a":1}\n\n: ping\n\ndata: {"b":2}\r\n\r\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
async def test_stream_of_a_node_is_written_unchanged_at_any_chunk_size(size: int) -> None:
    sent, reply = await streamed(*(STREAM[i : i + size] for i in range(0, len(STREAM), size)))
    await reply.finish()
    assert sent.body == STREAM
    assert [message.get("more_body") for message in sent[1:]].count(False) == 1


@pytest.mark.parametrize("cut", range(1, len(STREAM)))
async def test_stream_that_breaks_at_any_byte_ends_well_formed(cut: int) -> None:
    sent, reply = await streamed(STREAM[:cut])
    await reply.abort(ERROR)
    assert sent.body.endswith(ENDING)
    forwarded = sent.body.removesuffix(ENDING)
    assert STREAM.startswith(forwarded.rstrip(b"\r\n"))
    assert not forwarded or forwarded.endswith((b"\n\n", b"\r\n\r\n", b"\r\n\n\n"))
    for line in forwarded.splitlines():
        assert line in STREAM.splitlines()


async def test_overlong_line_without_an_end_is_written_instead_of_buffered() -> None:
    sent, _ = await streamed(b"data: ", b"x" * MAX_BUFFERED_BYTES, b"y")
    assert len(sent.body) >= MAX_BUFFERED_BYTES


async def test_json_response_that_breaks_off_is_not_completed() -> None:
    sent = Sent()
    reply = Reply(sent)
    await reply.start(200, [], streamed=False)
    await reply.write(b'{"a"')
    await reply.abort(ERROR)
    assert sent.body == b'{"a"'
    assert all(message.get("more_body", True) for message in sent)


def metered(*chunks: bytes, is_stream: bool = True) -> Meter:
    meter = Meter(streamed=is_stream)
    for now, chunk in enumerate(chunks):
        meter.feed(chunk, float(now))
    return meter


def test_time_to_first_token_ends_at_the_first_non_empty_content() -> None:
    role, text = b'data: {"delta":{"role":"assistant","content":""}}\n\n', b'data: {"delta":{"content":"x"}}\n\n'
    assert metered(b": ping\n\n", role, text, text).first_at == 2.0
    assert metered(role, b'data: {"delta":{"reasoning_content":"hm"}}\n\n').first_at == 1.0
    assert metered(role).first_at is None
    assert metered(b'{"message":{"content":"x"}}', is_stream=False).first_at is None


def test_usage_is_read_from_the_last_usage_object_even_if_split_over_chunks() -> None:
    body = b'{"usage":null} {"usage": {"prompt_tokens":1}} {"usage" : {"prompt_tokens":5,"completion_tokens":3,'
    body += b'"prompt_tokens_details":{"cached_tokens":4}}} {"usage":null}'
    assert metered(*(body[i : i + 5] for i in range(0, len(body), 5))).usage() == Usage(5, 3, 4)


def test_usage_after_a_long_text_is_read_from_a_buffer_of_bounded_size() -> None:
    meter = metered(*[b"x" * 50_000] * 40, b'"usage":{"prompt_tokens":2,"completion_tokens":1}}')
    assert meter.usage() == Usage(2, 1, 0)
    assert len(meter._tail) < 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'"usage"',
        b'"usage":',
        b'"usage":7',
        b'"usage":{"prompt',
        b'"usage":[1]',
        b'\\"usage\\":{"prompt_tokens":1}',
    ],
)
def test_invalid_usage_object_of_a_node_is_ignored(body: bytes) -> None:
    assert metered(body).usage() is None


def test_invalid_token_counts_in_a_usage_object_are_read_as_zero() -> None:
    body = b'"usage":{"prompt_tokens":-5,"completion_tokens":"7","prompt_tokens_details":null}'
    assert metered(body).usage() == Usage(0, 0, 0)


@pytest.mark.parametrize(
    ("body", "renamed"),
    [
        (b'{"model":"m","n":1.0}', b'{"model":"Org/\\"M\\"","n":1.0}'),
        (b'{"n":1,\n "model" : "m" }', b'{"n":1,\n "model" : "Org/\\"M\\"" }'),
        (b'{"model":"m","x":"\\"model\\":\\"m\\""}', b'{"model":"Org/\\"M\\"","x":"\\"model\\":\\"m\\""}'),
        (b'{"x":{"model":"m"},"model":"m"}', b'{"x":{"model":"m"},"model":"Org/\\"M\\""}'),
        (b'{"model":"\\u006d"}', b'{"model":"Org/\\"M\\""}'),
    ],
)
def test_replacing_the_model_name_changes_nothing_else_in_the_request_body(body: bytes, renamed: bytes) -> None:
    request = parse_request("/", [], body)
    assert request.body_for('Org/"M"') == renamed
    assert request.body_for("m") is body


def test_tokens_per_second_exclude_the_time_of_load_and_prefill() -> None:
    usage = b'"usage":{"prompt_tokens":1,"completion_tokens":6}'
    text = b'data: {"delta":{"content":"x"}}\n\n'
    streaming = RequestRecord(started=-10.0, waited=10.0, duration=20.0, meter=metered(text, text, text + usage))
    streaming.usage = Usage(1, 6)
    assert streaming.tokens_per_second == 3.0
    non_streaming = RequestRecord(started=-10.0, waited=10.0, duration=12.0, meter=metered(usage, is_stream=False))
    non_streaming.usage = Usage(1, 6)
    assert non_streaming.tokens_per_second == 3.0
    assert RequestRecord(started=0.0, duration=1.0).tokens_per_second is None
