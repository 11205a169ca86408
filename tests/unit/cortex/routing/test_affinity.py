"""Affinity keys of requests, and the ranking of nodes by key."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.fake_node import FakeNode
from cortex.running_gateway import eventually, running_cortex
from helexa.cortex.routing import KEY_BYTES, affinity_key, prefix_name, rank_nodes

LONG = "You are a careful assistant. " * 60


def body(**members: Any) -> bytes:
    return json.dumps({"model": "m", **members}).encode()


def chat(*texts: str, system: str = LONG, **members: Any) -> bytes:
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return body(messages=[{"role": "system", "content": system}, *turns], **members)


def test_all_turns_of_a_conversation_have_the_same_affinity_key() -> None:
    first = affinity_key(chat("Hi"))
    assert first is not None and len(first) == KEY_BYTES
    assert affinity_key(chat("Hi", "Hello", "And now?")) == first
    assert affinity_key(chat("Hi", "Hello", "And now?"), account="acme") != first
    assert affinity_key(chat("Hi", temperature=1, stream=True)) == first


def test_conversations_with_the_same_system_prompt_have_different_affinity_keys() -> None:
    keys = {affinity_key(chat(f"Question {i}")) for i in range(50)}
    assert len(keys) == 50 and None not in keys


def test_short_prompt_has_no_affinity_key_until_the_conversation_grows() -> None:
    assert affinity_key(chat("Hi", system="Be brief.")) is None
    turns = ["Hi", "x" * 600, "y" * 600, "ok", "more"]
    grown = affinity_key(chat(*turns[:3], system="Be brief."))
    assert grown is not None
    assert affinity_key(chat(*turns, system="Be brief.")) == grown
    assert affinity_key(chat("Hi", system="Be brief."), min_bytes=0) is not None


def test_affinity_key_depends_on_tools_and_system_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 2000}}]
    keys = {affinity_key(chat("Hi", system="s", tools=tools)), affinity_key(chat("Hi", system="t", tools=tools))}
    assert len(keys) == 2 and None not in keys
    anthropic = {"system": LONG, "messages": [{"role": "user", "content": "Hi"}]}
    assert affinity_key(body(**anthropic)) not in (None, affinity_key(body(**anthropic, tools=tools)))
    responses = {"instructions": LONG, "input": "Hi"}
    assert affinity_key(body(**responses)) not in (None, affinity_key(body(**responses | {"input": "Ho"})))


def test_moving_cache_control_marks_does_not_change_the_affinity_key() -> None:
    def turn(text: str, **mark: Any) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text, **mark}]}

    mark = {"cache_control": {"type": "ephemeral"}}
    first = affinity_key(body(system=LONG, messages=[turn("Hi", **mark)]))
    assert first is not None
    assert first == affinity_key(body(system=LONG, messages=[turn("Hi"), turn("Ho", **mark)]))


def test_session_id_header_takes_precedence_over_the_prompt_for_affinity() -> None:
    session = [(b"accept", b"*/*"), (b"x-session-id", b"s1")]
    by_header = affinity_key(chat("Hi"), session)
    assert by_header == affinity_key(chat("Quite another"), session) == affinity_key(b"not json", session)
    assert by_header != affinity_key(chat("Hi"), session, account="acme")
    by_key = affinity_key(chat("Hi", prompt_cache_key="k"))
    assert by_key == affinity_key(chat("Ho", system="short", prompt_cache_key="k"))
    by_agent = affinity_key(chat("Hi", metadata={"user_id": "user_1_session_2"}))
    assert by_agent == affinity_key(chat("Ho", metadata={"user_id": "user_1_session_2"}))
    assert len({by_header, by_key, by_agent, affinity_key(chat("Hi"))}) == 4
    assert affinity_key(chat("Hi", user="bob")) == affinity_key(chat("Hi", user="eve")) == affinity_key(chat("Hi"))


@pytest.mark.parametrize("name", ["", 7, None, {"a": 1}, "x" * 513, "\ud800"])
def test_with_an_invalid_session_id_affinity_follows_the_prompt(name: Any) -> None:
    assert affinity_key(chat("Hi", metadata={"user_id": name})) in (affinity_key(chat("Hi")), None)
    assert affinity_key(chat("Hi"), [(b"x-session-id", b"")]) == affinity_key(chat("Hi"))
    assert affinity_key(chat("Hi"), [(b"x-session-id", b"x" * 513)]) == affinity_key(chat("Hi"))


def test_text_completion_prompt_that_grows_keeps_its_affinity_key() -> None:
    prompt = LONG * 2
    key = affinity_key(body(prompt=prompt))
    assert key is not None and key == affinity_key(body(prompt=prompt + "more"))
    assert affinity_key(body(prompt="short")) is None
    assert affinity_key(body(prompt=prompt), min_bytes=3000) == affinity_key(body(prompt=prompt + "x"), min_bytes=3000)


def test_affinity_key_depends_on_both_ends_of_a_long_message() -> None:
    text = "x" * 300_000
    keys = {affinity_key(chat(text)), affinity_key(chat("y" + text[1:])), affinity_key(chat(text[1:] + "y"))}
    assert len(keys) == 3


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"messages": 7}',
        b'{"messages": [7]}',
        b'{"messages": ["a"], "prompt": 5}',
        b'{"messages": null, "metadata": null, "tools": null}',
        b'{"messages": [{"role": 5, "content": null}]}',
        b'{"prompt": [1, 2, 3]}',
        b'{"input": ["a", "b"]}',
        b'{"messages": ' + b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_malformed_body_has_no_affinity_key(raw: bytes) -> None:
    assert affinity_key(raw) is None


@given(st.binary(max_size=200))
def test_affinity_key_of_any_bytes_raises_no_error(raw: bytes) -> None:
    affinity_key(raw, [(b"x-session-id", raw)], "a", 0)
    affinity_key(b'{"messages": [' + raw + b"]}", min_bytes=0)


@given(st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=12), st.text(min_size=1, max_size=8))
def test_new_node_does_not_change_the_affinity_order_of_existing_nodes(names: set[str], joining: str) -> None:
    names.discard(joining)
    for number in range(30):
        key = number.to_bytes(KEY_BYTES)
        old_ranking, new_ranking = rank_nodes(names, "M", key), rank_nodes({*names, joining}, "M", key)
        assert [name for name in new_ranking if name != joining] == old_ranking


def test_affinity_keys_spread_evenly_and_few_move_to_a_new_node() -> None:
    keys = [number.to_bytes(KEY_BYTES) for number in range(2000)]
    four, five = ["a", "b", "c", "d"], ["a", "b", "c", "d", "e"]
    homes = [(rank_nodes(four, "M", key)[0], rank_nodes(five, "M", key)[0]) for key in keys]
    for name in five:
        assert 300 < sum(new_home == name for _, new_home in homes) < 500
    moved = [(old_home, new_home) for old_home, new_home in homes if old_home != new_home]
    assert {new_home for _, new_home in moved} == {"e"} and 300 < len(moved) < 500
    assert sum(rank_nodes(four, "Other", key)[0] == home for key, (home, _) in zip(keys, homes, strict=True)) < 700


async def test_request_goes_to_the_node_that_reports_its_prompt_as_cached() -> None:
    async with (
        FakeNode(name="n1").holds("Org/M").serving() as first,
        FakeNode(name="n2").holds("Org/M").serving() as second,
        running_cortex(first, second) as cortex,
    ):
        session = {"prompt_cache_key": "s1"}
        await cortex.ask(**session)
        (used, other) = (first, second) if first.headers else (second, first)
        name = used.headers[-1]["x-helexa-prefix"]
        assert name == prefix_name(affinity_key(json.dumps(session).encode()) or b"")
        other.health = {"models": [{"id": "Org/M", "memory_prefixes": [name]}]}
        await eventually(lambda: cortex.gateway.fleet.node(other.name).health.models)  # type: ignore[union-attr]
        await cortex.ask(**session)
        assert len(other.headers) == 1
        candidates = (await cortex.get("/api/explain?model=Org/M"))["candidates"]
        (verdict,) = [entry["verdict"] for entry in candidates if entry["node"] == other.name]
        assert verdict.endswith("cached beginnings of prompts: 1 in memory")
        (load,) = [load for node in (await cortex.get("/api/nodes"))["nodes"] for load in node["load"]]
        assert "memory_prefixes" not in load
