"""Streams of any bytes, cut anywhere, as events of Anthropic's API."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cortex.anthropic import sdk
from cortex.anthropic.openai_stream import (
    CACHED,
    DONE,
    KEEP_ALIVE,
    MIXED,
    ROLE,
    calls,
    event,
    finish,
    pieces_of,
    said,
    thought,
    usage,
)
from cortex.anthropic.sdk import translated
from helexa.cortex.anthropic.responses.stream import MessageStream

WHOLE = [ROLE, thought("hm"), KEEP_ALIVE, said("Grüße 🦊"), *[calls(one) for one in MIXED], finish("tool_calls")]
WHOLE += [usage(7, 2, **CACHED), DONE]


@given(st.data(), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_however_it_is_cut_the_events_are_the_same(data: st.DataObject, newline: bytes) -> None:
    raw = b"".join(WHOLE).replace(b"\n", newline)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    chunks = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert translated(*chunks) == translated(*WHOLE)


def test_byte_by_byte_the_events_are_the_same() -> None:
    raw = b"".join(WHOLE)
    assert translated(*[raw[at : at + 1] for at in range(len(raw))]) == translated(*WHOLE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=4) | st.sampled_from(["{", "}", '{"a"', ":1}"]),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=5,
)
PIECES = st.fixed_dictionaries(
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
        "tool_calls": st.lists(PIECES | JSON, max_size=3) | JSON,
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
def test_whatever_a_node_sends_the_client_gets_a_message_or_an_error(chunks: list[bytes]) -> None:
    stream = MessageStream("small", "msg_1")
    sent = b"".join([stream.feed(chunk) for chunk in chunks]) + stream.finish()
    events = sdk.parsed(sent)
    sdk.check_order(events)
    assert (events[-1]["type"] == "error") == (stream.failure is not None)
    if stream.failure is None:
        sdk.message(sent)


SAYINGS = st.lists(st.tuples(st.sampled_from(["text", "thinking"]), st.text(min_size=1, max_size=6)), max_size=8)


@given(SAYINGS, st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=3), max_size=3), st.randoms())
def test_nothing_that_a_node_says_is_lost(sayings: Any, arguments: list[Any], random: Any) -> None:
    spoken = [said(text) if kind == "text" else thought(text) for kind, text in sayings]
    called = [pieces_of(index, (f"c{index}", "f", value), 2) for index, value in enumerate(arguments)]
    while called:  # the pieces of all calls, mixed, each call's in their order
        chosen = random.choice(called)
        spoken.insert(random.randint(len(sayings), len(spoken)), b"") if random.random() < 0.1 else None
        spoken.append(calls(chosen.pop(0)))
        called = [left for left in called if left]
    content = sdk.message(translated(*spoken, finish("tool_calls"), DONE)).content
    for kind in ("text", "thinking"):
        texts = "".join([block.to_dict()[kind] for block in content if block.type == kind])
        assert texts == "".join([text for its, text in sayings if its == kind])
    uses = {block.id: block.input for block in content if block.type == "tool_use"}
    assert uses == {f"c{index}": value for index, value in enumerate(arguments)}
