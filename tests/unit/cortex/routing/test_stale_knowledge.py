"""What the gateway knows about models may be out of date or incomplete. A 404 needs the reports of all nodes."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from cortex import fake_node
from cortex.fake_node import FakeNode, Speak
from cortex.running_gateway import Cortex, eventually, running_cortex
from helexa.core.errors import model_not_found
from helexa.cortex.fleet import poller
from ports import free_port

SLOW_POLLS = 600.0
HELEXA = model_not_found("Org/M", "no model is loaded").envelope()
VLLM = {"object": "error", "message": "The model `Org/M` does not exist.", "type": "NotFoundError", "code": 404}
OLLAMA = {"error": {"message": 'model "Org/M" not found, try pulling it first', "type": "api_error", "code": None}}
LITELLM = {
    "error": {
        "message": "/chat/completions: Invalid model name passed in model=Org/M. Call `/v1/models` to view models.",
        "type": "invalid_request_error",
        "param": None,
        "code": "400",
    }
}


def lost(body: Any) -> Speak:
    """Return a handler of a node that answers only for the models it holds."""

    async def speak(node: FakeNode, request: web.Request) -> web.StreamResponse:
        if any(model["id"] == "Org/M" for model in node.models):
            return await fake_node.respond(node, request)
        return web.json_response(body, status=400 if body is LITELLM else 404)

    return speak


def rejection(answer: tuple[int, Any]) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["code"]


@pytest.mark.parametrize("body", [HELEXA, VLLM, OLLAMA, LITELLM])
async def test_request_to_a_node_that_lost_the_model_is_served_by_another_node(body: Any) -> None:
    async with (
        FakeNode("n1", speak=lost(body)).holds("Org/M").serving() as first,
        FakeNode("n2", speak=lost(body)).holds("Org/M").serving() as second,
        running_cortex(first, second, poll_interval_secs=SLOW_POLLS) as cortex,
    ):
        first.models = []
        assert [(await cortex.ask(stream=number % 2 == 0))[0] for number in range(20)] == [200] * 20
        assert len(first.bodies) <= 1  # after its first 404, the gateway knows


async def test_catalog_model_that_its_node_has_lost_is_loaded_again() -> None:
    node = FakeNode(speak=lost(HELEXA)).holds("Org/M")
    async with (
        node.serving(),
        running_cortex(node, poll_interval_secs=SLOW_POLLS, models=[{"id": "Org/M"}]) as cortex,
    ):
        node.models = []
        assert (await cortex.ask())[0] == 200
        assert [load["model_id"] for load in node.loads] == ["Org/M"]
        node.models = []
        answers = await asyncio.gather(*(cortex.ask() for _ in range(8)))
        assert [status for status, _ in answers] == [200] * 8
        assert len(node.loads) == 2


async def test_model_lost_by_its_node_that_cannot_be_reloaded_is_a_retryable_503() -> None:
    node = FakeNode(speak=lost(VLLM)).holds("Org/M")
    async with node.serving(), running_cortex(node, poll_interval_secs=SLOW_POLLS) as cortex:
        node.models = []
        body = {"model": "Org/M", "messages": [{"role": "user", "content": "Hi"}]}
        async with cortex.client.post(f"{cortex.url}/v1/chat/completions", json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], response.headers["retry-after"]) == (
                503,
                "service_unavailable",
                "2",
            )
        assert error["message"] == "node 'n1' does not have model 'Org/M' loaded any more; try again"
        assert rejection(await cortex.ask()) == (404, "model_not_found")  # all nodes have said that they do not have it


async def test_node_that_keeps_losing_a_model_gets_one_load_per_request() -> None:
    async def always_lost(node: FakeNode, request: web.Request) -> web.StreamResponse:
        return web.json_response(HELEXA, status=404)

    node = FakeNode(speak=always_lost).holds("Org/M")
    async with node.serving(), running_cortex(node, poll_interval_secs=SLOW_POLLS, models=[{"id": "Org/M"}]) as cortex:
        assert rejection(await cortex.ask()) == (503, "service_unavailable")
        assert (len(node.bodies), len(node.loads)) == (2, 1)


async def test_tokenize_for_a_model_that_its_node_has_lost_is_a_retryable_503() -> None:
    node = FakeNode(speak=lost(HELEXA)).holds("Org/M")
    async with node.serving(), running_cortex(node, poll_interval_secs=SLOW_POLLS) as cortex:
        node.models = []
        async with cortex.client.post(f"{cortex.url}/tokenize", json={"model": "Org/M", "prompt": "Hi"}) as response:
            assert (response.status, response.headers["retry-after"]) == (503, "5")


async def status_of(cortex: Cortex, method: str, path: str) -> tuple[int, str | None]:
    body = {"model": "Org/Else", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    async with cortex.client.request(method, cortex.url + path, json=body if method == "POST" else None) as response:
        return response.status, response.headers.get("retry-after")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models/Org%2FElse"),
    ],
)
async def test_unknown_model_is_404_only_after_each_node_has_reported_its_models(method: str, path: str) -> None:
    down = FakeNode("down", url=f"http://127.0.0.1:{free_port()}")
    async with FakeNode("up").holds("Org/M").serving() as up, running_cortex(up, down, ready=False) as cortex:
        await eventually(lambda: cortex.gateway.fleet.node("up").healthy)
        assert await status_of(cortex, method, path) == (503, "3")
        cortex.gateway.fleet.configure(cortex.gateway.config.neurons[:1])
        assert await status_of(cortex, method, path) == (404, None)


async def test_model_of_a_node_that_went_down_after_its_first_report_is_a_retryable_503() -> None:
    async with (
        FakeNode("up").holds("Org/M").serving() as up,
        FakeNode("down").holds("Org/Else").serving() as down,
        running_cortex(up, down) as cortex,
    ):
        down.down = True
        await eventually(lambda: not cortex.gateway.fleet.node("down").healthy)
        assert (await status_of(cortex, "POST", "/v1/chat/completions"))[0] == 503


@pytest.mark.parametrize("kind", ["neuron", "openai"])
async def test_model_loaded_since_the_last_poll_is_found_before_a_request_is_rejected(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(poller, "REFRESH_SECS", 0.0)
    async with FakeNode().holds("Org/M").serving() as node:
        neurons = [{"name": "n1", "endpoint": node.url, "kind": kind}]
        async with running_cortex(
            node, poll_interval_secs=SLOW_POLLS, settings={"neurons": neurons}, aliases={"new": "Org/New"}
        ) as cortex:
            node.holds("Org/New")
            assert (await cortex.ask("new"))[0] == 200
            assert rejection(await cortex.ask("Org/Unknown")) == (404, "model_not_found")


async def test_requests_for_unknown_models_cause_no_polls_after_a_fresh_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "REFRESH_SECS", 600.0)
    async with (
        FakeNode().holds("Org/M").serving() as node,
        running_cortex(node, poll_interval_secs=SLOW_POLLS) as cortex,
    ):
        polled = len(node.polled_paths)
        assert [(await cortex.ask(f"Org/{number}"))[0] for number in range(9)] == [404] * 9
        assert len(node.polled_paths) == polled


async def test_requests_for_unknown_models_share_one_poll_and_do_not_wait_for_a_silent_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poller, "REFRESH_SECS", 0.0)
    monkeypatch.setattr(poller, "REFRESH_TIMEOUT_SECS", 0.1)
    async with (
        FakeNode().holds("Org/M").serving() as node,
        running_cortex(node, poll_interval_secs=SLOW_POLLS) as cortex,
    ):
        node.may_answer_polls.clear()
        polled = len(node.polled_paths)
        answers = await asyncio.gather(*(cortex.ask(f"Org/{number}") for number in range(9)))
        assert [status for status, _ in answers] == [404] * 9
        assert len(node.polled_paths) == polled + 1


async def test_failed_polls_caused_by_unknown_models_do_not_mark_a_node_as_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poller, "REFRESH_SECS", 0.0)
    async with (
        FakeNode().holds("Org/M").serving() as node,
        running_cortex(node, poll_interval_secs=SLOW_POLLS) as cortex,
    ):
        node.down = True  # its polls fail
        assert [(await cortex.ask(f"Org/{number}"))[0] for number in range(5)] == [404] * 5
        state = cortex.gateway.fleet.node("n1")
        assert (state.healthy, state.misses) == (True, 0)
