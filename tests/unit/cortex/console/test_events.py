"""The stream of events: nodes, models and finished requests."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.core import logs
from helexa.cortex.console import events as console_events

KEYS = [
    {"key": "root", "account_id": "ops", "role": "admin"},
    {"key": "a", "account_id": "alice"},
    {"key": "alices-secret", "account_id": "alice", "key_id": "alice-2"},
    {"key": "b", "account_id": "bob", "models": []},
]


@pytest.fixture
async def keyed(node: FakeNode) -> AsyncIterator[Cortex]:
    settings = {"entitlements": {"require_auth": True, "keys": KEYS}}
    async with running_cortex(node, settings=settings, models=[{"id": "Org/New"}]) as cortex:
        yield cortex


class Events:
    """The events of one stream."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._lines = response.content

    async def next(self, name: str) -> Any:
        """Return the data of the next event `name`; skip other events."""
        async with asyncio.timeout(60):
            current = ""
            while line := (await self._lines.readline()).decode():
                if line.startswith("event: "):
                    current = line[7:].strip()
                elif line.startswith("data: ") and current == name:
                    return json.loads(line[6:])
        raise AssertionError("the stream has ended")


@asynccontextmanager
async def following(cortex: Cortex, topics: str, key: str = "root") -> AsyncIterator[Events]:
    headers = {"authorization": f"Bearer {key}"}
    async with cortex.client.get(f"{cortex.url}/api/events?topics={topics}", headers=headers) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        yield Events(response)


async def ask(cortex: Cortex, key: str, model: str = "Org/M") -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    headers = {"authorization": f"Bearer {key}"}
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body, headers=headers) as response:
        await response.read()


async def test_event_stream_sends_the_whole_state_first_and_then_changes(keyed: Cortex) -> None:
    async with following(keyed, "nodes") as events:
        assert await events.next("names") == ["n1"]
        assert not (await events.next("node"))["cordoned"]
        keyed.gateway.fleet.cordon("n1", True)
        assert (await events.next("node"))["cordoned"]


async def test_event_stream_sends_a_node_that_goes_down_with_the_reason(keyed: Cortex, node: FakeNode) -> None:
    async with following(keyed, "nodes") as events:
        await events.next("node")
        node.down = True
        entry = await events.next("node")
        assert entry["problem"] == "/models answered HTTP 500"
        while entry["healthy"]:
            entry = await events.next("node")


async def test_event_stream_sends_a_failed_load_with_the_reason(keyed: Cortex, node: FakeNode) -> None:
    node.load_error = (400, {"error": "no such file"})
    async with following(keyed, "nodes") as events:
        await ask(keyed, "a", "Org/New")
        entry: Any = {}
        while not entry.get("failures"):
            entry = await events.next("node")
        [failure] = entry["failures"]
        assert failure["model"] == "Org/New" and "no such file" in failure["message"] and not failure["temporary"]


async def test_event_stream_sends_the_node_names_without_a_removed_node(keyed: Cortex) -> None:
    async with following(keyed, "nodes") as events:
        await events.next("node")
        keyed.gateway.fleet.configure([])
        assert await events.next("names") == []


async def test_event_stream_sends_finished_requests_to_admins_and_to_their_account(keyed: Cortex) -> None:
    async with following(keyed, "activity") as all_events, following(keyed, "activity", "a") as own_events:
        await eventually(lambda: len(node_watchers(keyed)) == 2)
        await ask(keyed, "b")
        await ask(keyed, "a")
        assert (await all_events.next("request"))["account_id"] == "bob"
        assert (await all_events.next("request"))["account_id"] == "alice"
        assert (await own_events.next("request"))["account_id"] == "alice"


def node_watchers(cortex: Cortex) -> range:
    return range(cortex.gateway.poller._watchers)


async def test_event_stream_sends_only_models_that_the_key_may_use(keyed: Cortex) -> None:
    async with following(keyed, "models", "a") as events:
        models = await events.next("models")
        assert {model["id"]: model["state"] for model in models} == {"Org/New": "cold", "Org/M": "warm"}
    async with following(keyed, "models", "b") as events:
        assert await events.next("models") == []


@pytest.mark.parametrize(
    ("topics", "key", "status"),
    [
        ("nodes", "a", 403),
        ("nodes,activity", "a", 403),
        ("log", "a", 403),
        ("nodes", "unknown", 401),
        ("x", "root", 400),
        ("", "a", 400),
    ],
)
async def test_unknown_and_forbidden_event_topics_are_rejected(
    keyed: Cortex, topics: str, key: str, status: int
) -> None:
    headers = {"authorization": f"Bearer {key}"}
    async with keyed.client.get(f"{keyed.url}/api/events?topics={topics}", headers=headers) as response:
        assert response.status == status


async def test_event_stream_ends_if_its_key_is_revoked(keyed: Cortex) -> None:
    headers = {"authorization": "Bearer root"}
    async with keyed.client.post(f"{keyed.url}/api/keys", json={"account_id": "dora"}, headers=headers) as response:
        made = await response.json()
    async with following(keyed, "activity", made["key"]) as events:
        async with keyed.client.delete(f"{keyed.url}/api/keys/{made['key_id']}", headers=headers) as response:
            assert response.status == 200
        end = await events.next("end")
        assert end["error"]["message"] == "this API key was revoked; use another one"


async def test_nodes_are_polled_often_only_while_a_client_reads_node_events(node: FakeNode) -> None:
    async with running_cortex(node, poll_interval_secs=0.05) as cortex:
        cortex.gateway.poller.interval_secs = 1000.0
        before = len(node.polled_paths)
        async with following(cortex, "nodes") as events:
            await events.next("node")
            await eventually(lambda: len(node.polled_paths) > before + 2)
        await eventually(lambda: not node_watchers(cortex))


async def test_event_stream_client_above_the_limit_gets_a_503(keyed: Cortex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_events, "MAX_WATCHERS", 1)
    async with following(keyed, "activity") as events:
        await ask(keyed, "a")
        await events.next("request")
        headers = {"authorization": "Bearer root"}
        async with keyed.client.get(f"{keyed.url}/api/events", headers=headers) as response:
            assert response.status == 503 and "retry-after" in response.headers


async def test_client_too_slow_for_the_event_stream_gets_the_number_of_dropped_requests(
    keyed: Cortex, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(keyed, "activity") as events:
        hub = keyed.gateway.observers[0].__self__  # type: ignore[attr-defined]
        await eventually(lambda: len(node_watchers(keyed)) == 1)
        monkeypatch.setattr(hub, "_requests", type(hub._requests)(maxlen=2))
        hub_activity = [await activity_of(keyed, number) for number in range(5)]
        for activity in hub_activity:
            hub.publish(activity)
        assert await events.next("dropped") == {"requests": 3}
        assert (await events.next("request"))["request_id"] == "3"


async def activity_of(cortex: Cortex, number: int) -> Any:
    from helexa.cortex.ledger.activity_and_usage_totals import Activity

    return Activity(str(number), 0, "/v1/chat/completions", "Org/M", 200, 1.0)


async def test_event_stream_sends_log_lines_to_admins_without_secrets(keyed: Cortex) -> None:
    log = logging.getLogger("helexa.cortex.test")
    log.warning("before: %s", "postgresql://me:hunter2@host/db")
    async with following(keyed, "log") as events:
        line = await events.next("log")
        while not line["message"].startswith("before"):
            line = await events.next("log")
        assert (line["level"], line["logger"]) == ("WARNING", "helexa.cortex.test")
        assert line["message"] == "before: postgresql://[hidden]@host/db"
        log.error("after\nlevel=INFO forged: Bearer abcdefgh, hlx_0123456789, api_key=x1y2z3, alices-secret")
        after = await events.next("log")
        assert after["message"] == (r"after\nlevel=INFO forged: Bearer [hidden], [hidden], api_key=[hidden], [hidden]")


async def test_event_topic_log_needs_an_admin_key_even_if_the_gateway_requires_no_keys(cortex: Cortex) -> None:
    async with cortex.client.get(f"{cortex.url}/api/events?topics=log") as response:
        assert response.status == 403


async def test_event_stream_client_that_misses_log_lines_gets_their_number(keyed: Cortex) -> None:
    lines = keyed.gateway.log_lines
    async with following(keyed, "log") as events:
        logging.getLogger("helexa.test").warning("first")
        while (await events.next("log"))["message"] != "first":
            pass
        for number in range(logs.MAX_LINES + 2):
            lines.emit(logging.makeLogRecord({"msg": f"line {number}"}))
        dropped = (await events.next("dropped"))["lines"]
        first = (await events.next("log"))["message"]  # the gateway may have logged other lines meanwhile
        assert first.startswith("line ") and 2 <= int(first.split()[1]) <= dropped


async def test_event_stream_ends_with_an_event_before_the_gateway_stops(node: FakeNode) -> None:
    async with aiohttp.ClientSession() as client, AsyncExitStack() as stack:
        cortex = await stack.enter_async_context(running_cortex(node))
        async with client.get(f"{cortex.url}/api/events") as response:
            await eventually(lambda: node_watchers(cortex))
            closing = asyncio.create_task(stack.aclose())
            assert (await Events(response).next("end"))["error"]["code"] == "shutting_down"
        await closing
