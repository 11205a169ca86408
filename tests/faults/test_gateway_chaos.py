"""A gateway whose nodes die, hang, lie and come back: every client gets a right answer or a right error, and nothing
leaks."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from cortex import fake_node
from cortex.fake_node import CHOICE, DONE, FINAL, STREAM, FakeNode, Speak, begin
from cortex.running import eventually, running_cortex
from nightly import cases

MODEL = "Org/M"
HANG_SECS = 2.0
ERRORS = {
    500: {None, "engine_error", "upstream_error"},
    502: {"upstream_connection_error", "upstream_error"},
    503: {"service_unavailable", "rate_limit_exceeded"},
    504: {"upstream_timeout"},
}


def cut(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.close()


async def slow(node: FakeNode, request: web.Request) -> web.StreamResponse:
    if not (await request.json()).get("stream"):
        await asyncio.sleep(0.02)
        return await fake_node.respond(node, request)
    response = await begin(request)
    for piece in STREAM:
        await asyncio.sleep(0.005)
        for start in range(0, len(piece), 7):
            await response.write(piece[start : start + 7])
    return response


async def die_on_the_way(node: FakeNode, request: web.Request) -> web.StreamResponse:
    streamed = (await request.json()).get("stream")
    return await (fake_node.die_within_an_event if streamed else fake_node.die_within_json)(node, request)


async def die_before_the_head(node: FakeNode, request: web.Request) -> web.StreamResponse:
    cut(request)
    return web.Response()


async def say_garbage(node: FakeNode, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"\x16\x03\x01 what? \r\n\r\n")
    cut(request)
    return web.Response()


async def cut_a_chunk(node: FakeNode, request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    request.transport.write(head + b"ff\r\n" + b'{"id":')
    cut(request)
    return web.Response()


async def fail(node: FakeNode, request: web.Request) -> web.StreamResponse:
    error = {"message": "the engine died", "type": "api_error", "code": "engine_error", "param": None}
    return web.json_response({"error": error}, status=500)


async def fail_in_html(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="<pre>Traceback: /home/me/secret.py</pre>", content_type="text/html")


async def speak_for_a_dead_node(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.Response(status=502, text="<html>Bad Gateway</html>", content_type="text/html")


async def welcome(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>It works!</html>", content_type="text/html")


async def send_elsewhere(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.Response(status=307, headers={"location": "http://elsewhere/v1/chat/completions"})


async def fail_in_a_word(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "it is late"}, status=500)


async def fail_on_the_way(node: FakeNode, request: web.Request) -> web.StreamResponse:
    streamed = (await request.json()).get("stream")
    return await (fake_node.fail_within_a_stream if streamed else fail)(node, request)


async def hang(node: FakeNode, request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


ILLS: list[Speak] = [
    die_on_the_way,
    die_before_the_head,
    fake_node.die_before_the_first_byte,
    say_garbage,
    cut_a_chunk,
    fail,
    fail_in_html,
    fail_in_a_word,
    speak_for_a_dead_node,
    welcome,
    send_elsewhere,
    fake_node.refuse,
    fail_on_the_way,
    hang,
]


def now_and_then(chance: random.Random, *ways: Speak) -> Speak:
    """A node that answers each request in one of these ways."""

    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return await chance.choice(ways)(node, request)

    return speak


@dataclass
class Host:
    """A node that can be killed and started again at the same address."""

    node: FakeNode
    port: int = 0
    _life: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start(self) -> None:
        await self._life.enter_async_context(self.node.serving(self.port))
        self.port = int(self.node.url.rsplit(":", 1)[1])

    async def kill(self) -> None:
        await self._life.aclose()


@dataclass
class Fleet:
    """A real gateway, the hosts behind it, and what its clients met."""

    url: str
    hosts: list[Host]
    client: aiohttp.ClientSession
    met: Counter[str] = field(default_factory=Counter)

    async def ask(self, *, stream: bool = False, session: str = "") -> str:
        """Ask once; the answer must be right, or a right refusal. Returns which."""
        body = {"model": MODEL, "stream": stream, "messages": [{"role": "user", "content": "Hi"}]}
        headers = {"x-session-id": session} if session else {}
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            try:
                content = await response.read()
            except aiohttp.ClientPayloadError:  # the only honest end of a JSON answer that has begun
                assert (response.status, response.content_type) == (200, "application/json")
                outcome = "broken off"
            else:
                outcome = judge(response.status, response.content_type, content, stream=stream)
        self.met[outcome] += 1
        return outcome

    async def nodes(self) -> dict[str, dict[str, Any]]:
        async with self.client.get(f"{self.url}/api/nodes") as response:
            return {node["name"]: node for node in (await response.json())["nodes"]}

    async def nothing_runs(self) -> bool:
        """Neither by the gateway's count nor by the nodes'."""
        counted = [node["in_flight"] for node in (await self.nodes()).values()]
        return counted == [{}] * len(counted) and not any(host.node.speaking for host in self.hosts)


def judge(status: int, kind: str, content: bytes, *, stream: bool) -> str:
    if status != 200:
        assert kind == "application/json"
        return check_error(json.loads(content), status)
    if not stream:
        assert json.loads(content)["choices"] == [CHOICE]
        return "answered"
    assert kind == "text/event-stream" and content.endswith(DONE) and content.count(DONE) == 1
    if content == b"".join(piece for piece in STREAM if piece is not FINAL):
        return "answered"
    *events, last = [json.loads(frame[6:]) for frame in content[: -len(DONE)].split(b"\n\n") if frame[:6] == b"data: "]
    assert all("error" not in event for event in events)
    return check_error(last, 200)


def check_error(envelope: dict[str, Any], status: int) -> str:
    error = envelope["error"]
    assert error.keys() >= {"message", "type", "code"} and isinstance(error["message"], str)
    assert status == 200 or error["code"] in ERRORS[status], (status, error)
    assert not {"Traceback", "html", "secret"} & set(re.findall(r"\w+", error["message"]))
    return f"refused {status}"


@asynccontextmanager
async def running(*names: str, reset_secs: float = 0.3) -> AsyncIterator[Fleet]:
    """A gateway in front of nodes of these names; afterwards no task may be left."""
    before = asyncio.all_tasks()
    hosts = [Host(FakeNode(name).holds(MODEL)) for name in names]
    async with AsyncExitStack() as stack:
        for host in hosts:
            await host.start()
            stack.push_async_callback(host.kill)
        timeouts = {"idle_timeout_secs": HANG_SECS, "answer_timeout_secs": HANG_SECS}
        settings = {"routing": {"breaker_reset_secs": reset_secs}, "gateway": timeouts}
        cortex = running_cortex(*(host.node for host in hosts), poll_interval_secs=0.1, settings=settings)
        url = (await stack.enter_async_context(cortex)).url
        client = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Fleet(url, hosts, client)
    await eventually(lambda: not [task for task in asyncio.all_tasks() - before if not task.done()])


async def crowd(fleet: Fleet, requests: int, at_once: int, chance: random.Random) -> None:
    """Many clients; some hang up early."""
    gate = asyncio.Semaphore(at_once)

    async def one(stream: bool, session: str, patience: float) -> None:
        async with gate:
            try:
                async with asyncio.timeout(patience):
                    await fleet.ask(stream=stream, session=session)
            except TimeoutError:
                fleet.met["hung up"] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(requests):
            patience = chance.choice([0.005, 0.05]) if chance.random() < 0.1 else 60.0
            group.create_task(one(chance.random() < 0.5, f"s{number % 7}" if chance.random() < 0.5 else "", patience))


async def recovered(fleet: Fleet) -> None:
    """All nodes are well again: so must everything else be, and each of them is asked."""

    async def trusted() -> bool:
        await fleet.ask()
        nodes = (await fleet.nodes()).values()
        return all(node["healthy"] and not node["failing"] for node in nodes)

    await eventually(trusted)
    for host in fleet.hosts:
        host.node.bodies.clear()

    async def all_asked() -> bool:
        outcomes = await asyncio.gather(*(fleet.ask(stream=number % 2 == 0) for number in range(10)))
        assert set(outcomes) == {"answered"}
        return all(host.node.bodies for host in fleet.hosts)

    await eventually(all_asked)
    await eventually(fleet.nothing_runs)


@pytest.mark.parametrize("seed", range(cases(1, 10)))
async def test_a_storm(seed: int) -> None:
    chance = random.Random(seed)
    async with running("a", "b", "c", "d", "e") as fleet:
        over = asyncio.Event()

        async def make_trouble() -> None:
            while not over.is_set():
                host = chance.choice(fleet.hosts)
                host.node.speak = now_and_then(chance, fake_node.respond, slow, *chance.sample(ILLS, 3))
                host.node.down = chance.random() < 0.2
                if chance.random() < 0.3:
                    await host.kill()
                    await asyncio.sleep(chance.random() * 0.05)
                    await host.start()
                await asyncio.sleep(0.03)

        trouble = asyncio.create_task(make_trouble())
        await crowd(fleet, 300, 40, chance)
        over.set()
        await trouble
        assert fleet.met["answered"] > 100, fleet.met
        assert sum(fleet.met.values()) == 300
        for host in fleet.hosts:
            host.node.speak, host.node.down = None, False
        await recovered(fleet)


@pytest.mark.parametrize("ill", ILLS, ids=lambda ill: ill.__name__)
async def test_one_ill_at_a_time_on_the_only_node(ill: Speak) -> None:
    async with running("a") as fleet:
        fleet.hosts[0].node.speak = ill
        outcomes = [await fleet.ask(stream=stream) for stream in (True, False)]
        fleet.hosts[0].node.speak = None
        assert "answered" not in outcomes
        await eventually(fleet.nothing_runs)


@pytest.mark.parametrize(
    "ill",
    [
        die_before_the_head,
        say_garbage,
        fake_node.die_before_the_first_byte,
        fake_node.refuse,
        speak_for_a_dead_node,
        welcome,
        send_elsewhere,
    ],
    ids=lambda ill: ill.__name__,
)
async def test_what_one_node_fails_to_begin_another_answers(ill: Speak) -> None:
    async with running("ill", "well") as fleet:
        fleet.hosts[0].node.speak = ill
        for number in range(20):
            assert await fleet.ask(stream=number % 2 == 0) == "answered"
        assert fleet.hosts[0].node.bodies  # it was asked


async def test_three_dead_of_five() -> None:
    async with running("a", "b", "c", "d", "e") as fleet:
        for host in fleet.hosts[:3]:
            await host.kill()
        await crowd(fleet, 100, 20, random.Random(7))
        assert fleet.met["answered"] + fleet.met["hung up"] == 100, fleet.met

        async def dead_are_known() -> bool:
            return [node["healthy"] for node in (await fleet.nodes()).values()] == [False] * 3 + [True] * 2

        await eventually(dead_are_known)
        for host in fleet.hosts[:3]:
            await host.start()
        await recovered(fleet)


async def test_hung_nodes_hold_up_neither_the_picture_nor_other_clients() -> None:
    async with running("a", "b", "c", "d", "e") as fleet:
        for host in fleet.hosts[:3]:
            host.node.speak = hang
            host.node.may_answer_polls.clear()
        asking = [asyncio.create_task(fleet.ask(stream=number % 2 == 0)) for number in range(20)]
        await eventually(lambda: sum(host.node.speaking for host in fleet.hosts[:3]) > 3)
        for live in fleet.hosts[3:]:
            live.node.holds("Org/New")

        async def news_arrived() -> bool:
            nodes = (await fleet.nodes()).values()
            return [len(node["models"]) for node in nodes] == [1, 1, 1, 2, 2]

        await eventually(news_arrived)
        outcomes = Counter(await asyncio.gather(*asking))
        assert outcomes.keys() == {"answered", "refused 504"}  # who hangs has the request: nobody runs it twice
        for host in fleet.hosts[:3]:
            host.node.speak = None
            host.node.may_answer_polls.set()
        await recovered(fleet)


async def test_a_node_that_fails_at_once_does_not_draw_the_traffic() -> None:
    """It is always the emptiest, and nothing but its breaker says that it is not the healthiest."""
    async with running("ill", "well", reset_secs=600.0) as fleet:
        ill, well = (host.node for host in fleet.hosts)
        ill.speak, well.speak = say_garbage, slow
        await crowd(fleet, 200, 4, random.Random(5))
        assert fleet.met["answered"] + fleet.met["hung up"] == 200, fleet.met
        assert 0 < len(ill.bodies) < 10
        assert len(well.bodies) > 150


async def test_a_node_that_keeps_failing_is_left_alone_until_it_is_started_anew() -> None:
    async with running("ill", reset_secs=600.0) as fleet:
        [host] = fleet.hosts
        host.node.speak = say_garbage
        assert [await fleet.ask() for _ in range(5)] == ["refused 502"] * 3 + ["refused 503"] * 2
        assert len(host.node.bodies) == 3
        assert (await fleet.nodes())["ill"]["failing"] == [MODEL]
        await host.kill()

        async def known_as_down() -> bool:
            return not (await fleet.nodes())["ill"]["healthy"]

        await eventually(known_as_down)
        host.node.speak = None
        await host.start()
        await recovered(fleet)


@pytest.mark.parametrize("kept", [False, True], ids=["new connection", "kept connection"])
async def test_a_request_that_kills_its_node_is_given_to_one_more_and_not_to_all(kept: bool) -> None:
    async with running("a", "b", "c", "d", "e") as fleet:
        deaths: list[asyncio.Task[None]] = []

        async def die_of_it(node: FakeNode, request: web.Request) -> web.StreamResponse:
            host = next(host for host in fleet.hosts if host.node is node)
            deaths.append(asyncio.create_task(host.kill()))
            await asyncio.sleep(60)
            return web.Response()

        if kept:
            await recovered(fleet)  # which asks each of them
        for host in fleet.hosts:
            host.node.speak = die_of_it
        assert await fleet.ask() == "refused 502"
        await asyncio.gather(*deaths)
        assert len(deaths) == 2


async def test_who_hangs_up_leaves_nothing_behind() -> None:
    async with running("a") as fleet:
        node = fleet.hosts[0].node
        for ill in (hang, fake_node.never_end, fake_node.never_go_on):
            node.speak = ill
            asking = [asyncio.create_task(fleet.ask(stream=True)) for _ in range(20)]
            await eventually(lambda: node.speaking == 20)
            assert (await fleet.nodes())["a"]["in_flight"] == {MODEL: 20}
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await eventually(fleet.nothing_runs)
        node.speak = None
        assert (await fleet.nodes())["a"]["failing"] == []  # a client that leaves is no fault of the node
        assert await fleet.ask() == "answered"
