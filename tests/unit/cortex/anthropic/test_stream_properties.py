"""Translation of arbitrary node streams, split at any byte, into Messages API events."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cortex.anthropic import sse_events
from cortex.anthropic.openai_stream import (
    CACHED,
    DONE,
    INTERLEAVED,
    KEEP_ALIVE,
    ROLE,
    call_deltas,
    calls,
    event,
    finish,
    text_chunk,
    thinking_chunk,
    usage,
)
from cortex.anthropic.sse_events import translated
from helexa.cortex.anthropic.reply import MessageStream

STREAM = [
    ROLE,
    thinking_chunk("hm"),
    KEEP_ALIVE,
    text_chunk("Grüße 🦊"),
    *[calls(delta) for delta in INTERLEAVED],
    finish("tool_calls"),
]
STREAM += [usage(7, 2, **CACHED), DONE]


@given(st.data(), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_events_of_a_messages_stream_do_not_depend_on_chunk_boundaries(data: st.DataObject, newline: bytes) -> None:
    raw = b"".join(STREAM).replace(b"\n", newline)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    chunks = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert translated(*chunks) == translated(*STREAM)


def test_events_are_the_same_if_the_node_stream_is_read_byte_by_byte() -> None:
    raw = b"".join(STREAM)
    assert translated(*[raw[at : at + 1] for at in range(len(raw))]) == translated(*STREAM)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4) | st.sampled_from(["{", "}", '{"a"', ":1}"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=5,
)
TOOL_CALL_DELTAS = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 2) | JSON,
        "id": st.sampled_from(["1", "2"]) | JSON,
        "function": JSON
        | st.fixed_dictionaries(
            {},
            optional={"name": st.sampled_from(["f", ""]) | JSON, "arguments": st.sampled_from(["{", "}", "{}"]) | JSON},
        ),
    },
)
DELTAS = st.fixed_dictionaries(
    {},
    optional={
        "content": st.text(max_size=5) | JSON,
        "reasoning_content": st.text(max_size=5) | JSON,
        "reasoning": JSON,
        "refusal": JSON,
        "tool_calls": st.lists(TOOL_CALL_DELTAS | JSON, max_size=3) | JSON,
    },
)
CHOICES = st.fixed_dictionaries(
    {}, optional={"delta": DELTAS | JSON, "finish_reason": st.sampled_from(["stop", "length", None]) | JSON}
)
FRAMES = st.fixed_dictionaries(
    {}, optional={"choices": st.lists(CHOICES | JSON, max_size=2) | JSON, "usage": JSON, "error": st.none()}
)
CHUNKS = st.one_of(
    FRAMES.map(event), JSON.map(event), st.binary(max_size=20), st.sampled_from([DONE, KEEP_ALIVE, finish(), b"\n"])
)


@given(st.lists(CHUNKS, max_size=12))
def test_any_chunks_of_a_node_become_a_message_or_an_error(chunks: list[bytes]) -> None:
    stream = MessageStream("small", "msg_1")
    sent = b"".join([stream.feed(chunk) for chunk in chunks]) + stream.finish()
    events = sse_events.parsed(sent)
    sse_events.check_order(events)
    assert (events[-1]["type"] == "error") == (stream.failure is not None)
    if stream.failure is None:
        sse_events.message(sent)


CONTENT = st.lists(st.tuples(st.sampled_from(["text", "thinking"]), st.text(min_size=1, max_size=6)), max_size=8)


@given(CONTENT, st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=3), st.randoms())
def test_no_text_and_no_tool_call_of_a_node_stream_is_lost(contents: Any, arguments: list[Any], random: Any) -> None:
    chunks = [text_chunk(text) if kind == "text" else thinking_chunk(text) for kind, text in contents]
    remaining_calls = [call_deltas(index, (f"c{index}", "f", value), 2) for index, value in enumerate(arguments)]
    while remaining_calls:  # interleave the deltas of all calls, each call's deltas in order
        chosen = random.choice(remaining_calls)
        chunks.insert(random.randint(len(contents), len(chunks)), b"") if random.random() < 0.1 else None
        chunks.append(calls(chosen.pop(0)))
        remaining_calls = [deltas for deltas in remaining_calls if deltas]
    content = sse_events.message(translated(*chunks, finish("tool_calls"), DONE)).content
    for kind in ("text", "thinking"):
        texts = "".join([block.to_dict()[kind] for block in content if block.type == kind])
        assert texts == "".join([text for text_kind, text in contents if text_kind == kind])
    uses = {block.id: block.input for block in content if block.type == "tool_use"}
    assert uses == {f"c{index}": value for index, value in enumerate(arguments)}
