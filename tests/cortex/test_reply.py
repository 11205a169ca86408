"""How an answer reaches the client, and what is read from it on the way."""

from typing import Any

import pytest

from helexa.core.errors import ApiError
from helexa.cortex.observability.request_record import RequestRecord
from helexa.cortex.replies.reply import MAX_BUFFERED_BYTES, Reply
from helexa.cortex.requests.request import parse_request
from helexa.cortex.usage.meter import Meter, Usage

ERROR = ApiError(502, "upstream_connection_error", "gone")
ENDING = b'data: {"error":{"message":"gone","type":"invalid_request_error","code":"upstream_connection_error",'
ENDING += b'"param":null}}\n\ndata: [DONE]\n\n'


class Sent(list[dict[str, Any]]):
    """Records what a reply sends."""

    async def __call__(self, message: Any) -> None:
        self.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self)


async def never() -> Any:
    raise AssertionError


async def streamed(*chunks: bytes) -> tuple[Sent, Reply]:
    sent = Sent()
    reply = Reply(sent)
    await reply.start(200, [], streamed=True)
    for chunk in chunks:
        await reply.write(chunk)
    return sent, reply


STREAM = b'data: {"a":1}\n\n: ping\n\ndata: {"b":2}\r\n\r\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
async def test_however_it_is_cut_a_stream_arrives_whole(size: int) -> None:
    sent, reply = await streamed(*(STREAM[i : i + size] for i in range(0, len(STREAM), size)))
    await reply.finish()
    assert sent.body == STREAM
    assert [message.get("more_body") for message in sent[1:]].count(False) == 1


@pytest.mark.parametrize("cut", range(1, len(STREAM)))
async def test_wherever_it_breaks_off_a_stream_ends_well_formed(cut: int) -> None:
    sent, reply = await streamed(STREAM[:cut])
    await reply.abort(ERROR)
    assert sent.body.endswith(ENDING)
    before = sent.body.removesuffix(ENDING)
    assert STREAM.startswith(before.rstrip(b"\r\n"))
    assert not before or before.endswith((b"\n\n", b"\r\n\r\n", b"\r\n\n\n"))
    for line in before.splitlines():
        assert line in STREAM.splitlines()


async def test_a_line_is_not_held_without_bound() -> None:
    sent, _ = await streamed(b"data: ", b"x" * MAX_BUFFERED_BYTES, b"y")
    assert len(sent.body) >= MAX_BUFFERED_BYTES


async def test_a_json_answer_that_breaks_off_is_not_completed() -> None:
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


def test_the_first_token_is_the_first_content_that_is_not_empty() -> None:
    role, text = b'data: {"delta":{"role":"assistant","content":""}}\n\n', b'data: {"delta":{"content":"x"}}\n\n'
    assert metered(b": ping\n\n", role, text, text).first_at == 2.0
    assert metered(role, b'data: {"delta":{"reasoning_content":"hm"}}\n\n').first_at == 1.0
    assert metered(role).first_at is None
    assert metered(b'{"message":{"content":"x"}}', is_stream=False).first_at is None


def test_usage_is_found_when_cut_and_the_last_one_counts() -> None:
    body = b'{"usage":null} {"usage": {"prompt_tokens":1}} {"usage" : {"prompt_tokens":5,"completion_tokens":3,'
    body += b'"prompt_tokens_details":{"cached_tokens":4}}} {"usage":null}'
    assert metered(*(body[i : i + 5] for i in range(0, len(body), 5))).usage() == Usage(5, 3, 4)


def test_usage_after_much_text_is_found_in_a_bounded_tail() -> None:
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
def test_what_is_no_usage_is_none(body: bytes) -> None:
    assert metered(body).usage() is None


def test_counts_that_are_no_counts_are_zero() -> None:
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
def test_only_the_model_name_is_replaced(body: bytes, renamed: bytes) -> None:
    question = parse_request("/", [], body)
    assert question.body_for('Org/"M"') == renamed
    assert question.body_for("m") is body


def test_the_rate_is_over_the_time_in_which_tokens_came_and_never_over_a_cold_load() -> None:
    usage = b'"usage":{"prompt_tokens":1,"completion_tokens":6}'
    text = b'data: {"delta":{"content":"x"}}\n\n'
    spoken = RequestRecord(started=-10.0, waited=10.0, duration=20.0, meter=metered(text, text, text + usage))
    spoken.usage = Usage(1, 6)
    assert spoken.tokens_per_second == 3.0
    at_once = RequestRecord(started=-10.0, waited=10.0, duration=12.0, meter=metered(usage, is_stream=False))
    at_once.usage = Usage(1, 6)
    assert at_once.tokens_per_second == 3.0
    assert RequestRecord(started=0.0, duration=1.0).tokens_per_second is None
