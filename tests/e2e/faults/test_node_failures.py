"""A gateway whose nodes crash, hang, send garbage and return.

Every client gets a correct response or a correct error, and no task or request leaks.
"""

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
from cortex.running_gateway import eventually, running_cortex
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


async def die_within_the_response(node: FakeNode, request: web.Request) -> web.StreamResponse:
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


async def fail_as_a_proxy(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.Response(status=502, text="<html>Bad Gateway</html>", content_type="text/html")


async def send_a_welcome_page(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>It works!</html>", content_type="text/html")


async def redirect(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.Response(status=307, headers={"location": "http://elsewhere/v1/chat/completions"})


async def fail_with_a_plain_string(node: FakeNode, request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "it is late"}, status=500)


async def fail_within_the_response(node: FakeNode, request: web.Request) -> web.StreamResponse:
    streamed = (await request.json()).get("stream")
    return await (fake_node.fail_within_a_stream if streamed else fail)(node, request)


async def hang(node: FakeNode, request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


FAILURES: list[Speak] = [
    die_within_the_response,
    die_before_the_head,
    fake_node.die_before_the_first_byte,
    say_garbage,
    cut_a_chunk,
    fail,
    fail_in_html,
    fail_with_a_plain_string,
    fail_as_a_proxy,
    send_a_welcome_page,
    redirect,
    fake_node.refuse,
    fail_within_the_response,
    hang,
]


def random_handler(chance: random.Random, *handlers: Speak) -> Speak:
    """Return a handler that handles each request with a random one of `handlers`."""

    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return await chance.choice(handlers)(node, request)

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
    """A real gateway, its nodes, and the number of requests by outcome."""

    url: str
    hosts: list[Host]
    client: aiohttp.ClientSession
    outcomes: Counter[str] = field(default_factory=Counter)

    async def send(self, *, stream: bool = False, session: str = "") -> str:
        """Send one request. Assert a correct response or error; return the outcome."""
        body = {"model": MODEL, "stream": stream, "messages": [{"role": "user", "content": "Hi"}]}
        headers = {"x-session-id": session} if session else {}
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            try:
                content = await response.read()
            except aiohttp.ClientPayloadError:  # a JSON response that has begun can only be cut
                assert (response.status, response.content_type) == (200, "application/json")
                outcome = "broken off"
            else:
                outcome = judge(response.status, response.content_type, content, stream=stream)
        self.outcomes[outcome] += 1
        return outcome

    async def nodes(self) -> dict[str, dict[str, Any]]:
        async with self.client.get(f"{self.url}/api/nodes") as response:
            return {node["name"]: node for node in (await response.json())["nodes"]}

    async def nothing_runs(self) -> bool:
        """Return whether no request runs, by the counts of the gateway and of the nodes."""
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
    """Run a gateway with nodes of these names. Assert at the end that no task remains."""
    tasks_before = asyncio.all_tasks()
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
    await eventually(lambda: not [task for task in asyncio.all_tasks() - tasks_before if not task.done()])


async def crowd(fleet: Fleet, requests: int, at_once: int, chance: random.Random) -> None:
    """Send many requests, at most `at_once` concurrently. Some clients disconnect early."""
    slots = asyncio.Semaphore(at_once)

    async def send(stream: bool, session: str, timeout_secs: float) -> None:
        async with slots:
            try:
                async with asyncio.timeout(timeout_secs):
                    await fleet.send(stream=stream, session=session)
            except TimeoutError:
                fleet.outcomes["hung up"] += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(requests):
            timeout_secs = chance.choice([0.005, 0.05]) if chance.random() < 0.1 else 60.0
            tasks.create_task(
                send(chance.random() < 0.5, f"s{number % 7}" if chance.random() < 0.5 else "", timeout_secs)
            )


async def recovered(fleet: Fleet) -> None:
    """Wait until all nodes count as healthy again, each node gets requests, and no request runs."""

    async def trusted() -> bool:
        await fleet.send()
        nodes = (await fleet.nodes()).values()
        return all(node["healthy"] and not node["failing"] for node in nodes)

    await eventually(trusted)
    for host in fleet.hosts:
        host.node.bodies.clear()

    async def all_nodes_used() -> bool:
        outcomes = await asyncio.gather(*(fleet.send(stream=number % 2 == 0) for number in range(10)))
        assert set(outcomes) == {"answered"}
        return all(host.node.bodies for host in fleet.hosts)

    await eventually(all_nodes_used)
    await eventually(fleet.nothing_runs)


@pytest.mark.parametrize("seed", range(cases(1, 10)))
async def test_every_request_ends_with_an_answer_or_an_error_while_nodes_fail_at_random(seed: int) -> None:
    chance = random.Random(seed)
    async with running("a", "b", "c", "d", "e") as fleet:
        over = asyncio.Event()

        async def inject_failures() -> None:
            while not over.is_set():
                host = chance.choice(fleet.hosts)
                host.node.speak = random_handler(chance, fake_node.respond, slow, *chance.sample(FAILURES, 3))
                host.node.down = chance.random() < 0.2
                if chance.random() < 0.3:
                    await host.kill()
                    await asyncio.sleep(chance.random() * 0.05)
                    await host.start()
                await asyncio.sleep(0.03)

        injector = asyncio.create_task(inject_failures())
        await crowd(fleet, 300, 40, chance)
        over.set()
        await injector
        assert fleet.outcomes["answered"] > 100, fleet.outcomes
        assert sum(fleet.outcomes.values()) == 300
        for host in fleet.hosts:
            host.node.speak, host.node.down = None, False
        await recovered(fleet)


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
async def test_failure_of_the_only_node_is_an_error_response(failure: Speak) -> None:
    async with running("a") as fleet:
        fleet.hosts[0].node.speak = failure
        outcomes = [await fleet.send(stream=stream) for stream in (True, False)]
        fleet.hosts[0].node.speak = None
        assert "answered" not in outcomes
        await eventually(fleet.nothing_runs)


@pytest.mark.parametrize(
    "failure",
    [
        die_before_the_head,
        say_garbage,
        fake_node.die_before_the_first_byte,
        fake_node.refuse,
        fail_as_a_proxy,
        send_a_welcome_page,
        redirect,
    ],
    ids=lambda failure: failure.__name__,
)
async def test_request_is_answered_by_another_node_if_a_node_fails_before_its_response(failure: Speak) -> None:
    async with running("bad", "good") as fleet:
        fleet.hosts[0].node.speak = failure
        for number in range(20):
            assert await fleet.send(stream=number % 2 == 0) == "answered"
        assert fleet.hosts[0].node.bodies  # the failing node got a request


async def test_two_of_five_nodes_answer_all_requests_after_three_have_died() -> None:
    async with running("a", "b", "c", "d", "e") as fleet:
        for host in fleet.hosts[:3]:
            await host.kill()
        await crowd(fleet, 100, 20, random.Random(7))
        assert fleet.outcomes["answered"] + fleet.outcomes["hung up"] == 100, fleet.outcomes

        async def dead_are_known() -> bool:
            return [node["healthy"] for node in (await fleet.nodes()).values()] == [False] * 3 + [True] * 2

        await eventually(dead_are_known)
        for host in fleet.hosts[:3]:
            await host.start()
        await recovered(fleet)


async def test_hung_nodes_delay_neither_polls_of_other_nodes_nor_other_clients() -> None:
    async with running("a", "b", "c", "d", "e") as fleet:
        for host in fleet.hosts[:3]:
            host.node.speak = hang
            host.node.may_answer_polls.clear()
        requests = [asyncio.create_task(fleet.send(stream=number % 2 == 0)) for number in range(20)]
        await eventually(lambda: sum(host.node.speaking for host in fleet.hosts[:3]) > 3)
        for live in fleet.hosts[3:]:
            live.node.holds("Org/New")

        async def news_arrived() -> bool:
            nodes = (await fleet.nodes()).values()
            return [len(node["models"]) for node in nodes] == [1, 1, 1, 2, 2]

        await eventually(news_arrived)
        outcomes = Counter(await asyncio.gather(*requests))
        assert outcomes.keys() == {
            "answered",
            "refused 504",
        }  # a hung node may run the request, so it is not sent again
        for host in fleet.hosts[:3]:
            host.node.speak = None
            host.node.may_answer_polls.set()
        await recovered(fleet)


async def test_node_that_fails_quickly_gets_few_requests_although_its_load_is_lowest() -> None:
    """A node that fails at once has the lowest load. Only the circuit breaker keeps requests away."""
    async with running("bad", "good", reset_secs=600.0) as fleet:
        bad, good = (host.node for host in fleet.hosts)
        bad.speak, good.speak = say_garbage, slow
        await crowd(fleet, 200, 4, random.Random(5))
        assert fleet.outcomes["answered"] + fleet.outcomes["hung up"] == 200, fleet.outcomes
        assert 0 < len(bad.bodies) < 10
        assert len(good.bodies) > 150


async def test_failing_node_gets_no_requests_until_the_node_is_restarted() -> None:
    async with running("bad", reset_secs=600.0) as fleet:
        [host] = fleet.hosts
        host.node.speak = say_garbage
        assert [await fleet.send() for _ in range(5)] == ["refused 502"] * 3 + ["refused 503"] * 2
        assert len(host.node.bodies) == 3
        assert (await fleet.nodes())["bad"]["failing"] == [MODEL]
        await host.kill()

        async def known_as_down() -> bool:
            return not (await fleet.nodes())["bad"]["healthy"]

        await eventually(known_as_down)
        host.node.speak = None
        await host.start()
        await recovered(fleet)


@pytest.mark.parametrize("reused", [False, True], ids=["new connection", "reused connection"])
async def test_request_that_kills_its_node_is_retried_on_only_one_other_node(reused: bool) -> None:
    async with running("a", "b", "c", "d", "e") as fleet:
        deaths: list[asyncio.Task[None]] = []

        async def die_of_it(node: FakeNode, request: web.Request) -> web.StreamResponse:
            host = next(host for host in fleet.hosts if host.node is node)
            deaths.append(asyncio.create_task(host.kill()))
            await asyncio.sleep(60)
            return web.Response()

        if reused:
            await recovered(fleet)  # opens connections to all nodes
        for host in fleet.hosts:
            host.node.speak = die_of_it
        assert await fleet.send() == "refused 502"
        await asyncio.gather(*deaths)
        assert len(deaths) == 2


async def test_client_disconnects_leave_no_running_requests_on_a_hanging_node() -> None:
    async with running("a") as fleet:
        node = fleet.hosts[0].node
        for failure in (hang, fake_node.never_end, fake_node.never_go_on):
            node.speak = failure
            requests = [asyncio.create_task(fleet.send(stream=True)) for _ in range(20)]
            await eventually(lambda: node.speaking == 20)
            assert (await fleet.nodes())["a"]["in_flight"] == {MODEL: 20}
            for task in requests:
                task.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            await eventually(fleet.nothing_runs)
        node.speak = None
        assert (await fleet.nodes())["a"]["failing"] == []  # a disconnect is not a failure of the node
        assert await fleet.send() == "answered"
