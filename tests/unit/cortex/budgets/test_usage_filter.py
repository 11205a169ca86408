"""Removal of the usage chunk from streams of clients that did not request it."""

import json
from typing import Any

import openai
import pytest

from cortex import fake_node
from cortex.fake_node import CHOICE, DONE, FINAL, ROLE, USAGE, FakeNode, begin, chunk, event
from cortex.running_gateway import Cortex, running_cortex
from helexa.cortex.forwarding.relay_and_keep_alive import MAX_BUFFERED_BYTES, UsageFilter

TEXT = [ROLE, chunk("Hel"), b": keep-alive\n\n", chunk('"usage": {"choices":[]}')]
LAST_WITH_CHOICE = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}], usage=USAGE)
END = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
NULL = event(choices=[{"index": 0, "delta": {"content": "x"}}], usage=None)
EMPTY = event(prompt_filter_results=[])
FORWARDED = [*TEXT, LAST_WITH_CHOICE, NULL, EMPTY]
CRLF = b"\r\n\r\n"


def filtered(stream: bytes, size: int) -> bytes:
    usage_filter = UsageFilter()
    chunks = [usage_filter.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    return b"".join([*chunks, usage_filter.flush()])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 300, 100_000])
@pytest.mark.parametrize("ending", [b"\n\n", CRLF])
def test_usage_filter_removes_only_the_usage_chunk_at_any_read_size(size: int, ending: bytes) -> None:
    stream = b"".join([*FORWARDED, FINAL, DONE]).replace(b"\n\n", ending)
    assert filtered(stream, size) == b"".join([*FORWARDED, DONE]).replace(b"\n\n", ending)
    assert filtered(stream[:-2], size) == b"".join([*FORWARDED, DONE]).replace(b"\n\n", ending)[:-2]


@pytest.mark.parametrize("cut", range(1, len(FINAL + DONE)))
def test_usage_chunk_split_across_two_reads_is_removed_from_the_stream(cut: int) -> None:
    usage_filter, stream = UsageFilter(), FINAL + DONE
    assert usage_filter.feed(ROLE) == ROLE
    assert usage_filter.feed(stream[:cut]) + usage_filter.feed(stream[cut:]) == DONE


@pytest.mark.parametrize("choices", [{"choices": []}, {"choices": None}, {}])
def test_usage_chunk_without_a_list_of_choices_is_removed(choices: dict[str, Any]) -> None:
    sent = b"data: " + json.dumps({"id": "c1", "usage": USAGE} | choices).encode() + b"\n\n"
    assert UsageFilter().feed(ROLE + sent + DONE) == ROLE + DONE


def test_done_marker_is_forwarded_without_waiting_for_more_data() -> None:
    usage_filter = UsageFilter()
    assert usage_filter.feed(FINAL + b"data: [DONE]") == b"data: [DONE]"
    assert usage_filter.feed(b"\n\n") == b"\n\n"


def test_long_event_is_forwarded_without_buffering() -> None:
    usage_filter, long = UsageFilter(), chunk("x" * MAX_BUFFERED_BYTES * 2)
    passed = [usage_filter.feed(long[at : at + 1000]) for at in range(0, len(long), 1000)]
    assert b"".join(passed) == long
    assert sum(not chunk for chunk in passed) <= MAX_BUFFERED_BYTES // 1000 + 1
    assert usage_filter.feed(FINAL) == b""


async def choices_of(cortex: Cortex, **fields: Any) -> list[Any]:
    """Return the first choice of every chunk, which OpenAI's examples read without a check."""
    async with openai.AsyncOpenAI(base_url=f"{cortex.url}/v1", api_key="capped", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "Hi"}]
        stream: Any = await client.chat.completions.create(model="Org/M", messages=messages, stream=True, **fields)
        return [chunk.choices[0] async for chunk in stream]


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
async def test_every_chunk_has_a_choice_if_the_client_requested_no_usage(
    cortex: Cortex, node: FakeNode, options: dict[str, Any]
) -> None:
    choices = await choices_of(cortex, **options)
    assert "".join(choice.delta.content or "" for choice in choices) == "Hello é"
    assert node.headers[0]["x-helexa-include-usage"] == "1"


async def test_usage_removed_from_the_stream_is_charged(node: FakeNode) -> None:
    keys = [{"key": "capped", "account_id": "acme", "key_id": "capped", "hard_cap": 100_000}]
    async with running_cortex(node, settings={"entitlements": {"keys": keys}}) as cortex:
        assert len(await choices_of(cortex)) == 3
        assert await cortex.sample("cortex_spend_tokens_total", account="acme", key="capped") == 9


async def strict_backend(node: FakeNode, request: Any) -> Any:
    """Respond like a third-party backend, which sends usage only if `stream_options` requests it."""
    body = await request.json()
    include_usage = (body.get("stream_options") or {}).get("include_usage") is True
    if not body.get("stream"):
        return fake_node.web.json_response({"choices": [CHOICE], "usage": USAGE})
    return await begin(request, ROLE, chunk("Hi"), END, *([FINAL] if include_usage else []), DONE)


@pytest.mark.parametrize("key", ["capped", None])
async def test_usage_of_a_charged_stream_is_requested_from_the_backend(node: FakeNode, key: str | None) -> None:
    node.speak = strict_backend
    settings = {
        "neurons": [{"name": "n1", "endpoint": node.url, "kind": "openai"}],
        "entitlements": {"keys": [{"key": "capped", "account_id": "acme", "key_id": "capped", "hard_cap": 100_000}]},
    }
    async with running_cortex(node, settings=settings) as cortex:
        body = {"model": "Org/M", "messages": [], "stream": True, "stream_options": {"include_obfuscation": False}}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body, headers=headers) as response:
            assert await response.read() == ROLE + chunk("Hi") + END + DONE
        assert not [name for name in node.headers[0] if name.lower().startswith("x-helexa-")]
        sent = json.loads(node.bodies[0])["stream_options"]
        assert sent == {"include_obfuscation": False} | ({"include_usage": True} if key else {})
        spent = await cortex.sample("cortex_spend_tokens_total", account="acme", key="capped")
        assert spent == (9 if key else 0)
