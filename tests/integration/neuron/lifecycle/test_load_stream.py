"""`POST /models/load` with progress as server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from helexa.neuron.hardware.nvidia_gpus import Accelerators
from helexa.neuron.lifecycle import load_preparation
from helexa.neuron.routes import model_management
from neuron.fake_models import make_model, release, starts, until
from neuron.running_node import Node, running


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with running({}) as node:
        yield node


def ask(node: Node, path: Path, accept: str = "text/event-stream", **fields: Any) -> Any:
    body = {"model_id": "org/tiny", "source": f"file:{path}", **fields}
    return node.session.post(f"{node.url}/models/load", json=body, headers={"accept": accept})


async def event(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    """Return the name and data of the next event, without comments."""
    name = b""
    while line := (await response.content.readline()).strip(b"\n") or b" ":
        if line.startswith(b"event: "):
            name = line[7:]
        elif line.startswith(b"data: "):
            return name.decode(), json.loads(line[6:])
        assert not response.content.at_eof()
    raise AssertionError


async def halfway(response: aiohttp.ClientResponse) -> Any:
    """Return the progress event of a slow load that has reached the weights."""
    while (latest := await event(response))[1].get("stage") != "weights":
        assert latest[0] == "progress"
    return latest[1]


@pytest.mark.parametrize("how", [{}, {"accept": "*/*", "stream": True}])
async def test_load_stream_reports_progress_until_the_end(node: Node, tmp_path: Path, how: dict[str, Any]) -> None:
    slow = make_model(tmp_path, "slow")
    async with ask(node, slow, **how) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        assert await halfway(response) == {"stage": "weights", "done": 1, "total": 2, "fraction": 0.5}
        release(slow)
        assert await event(response) == ("loaded", {"status": "loaded"})
        assert (await response.read()).strip() == b""


async def test_load_stream_without_progress_sends_keep_alive_comments(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_management, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(model_management, "KEEP_ALIVE_SECONDS", 0.05)
    slow = make_model(tmp_path, "slow")
    async with ask(node, slow) as response:
        await halfway(response)
        await response.content.readline()
        assert await response.content.readline() == b": keep-alive\n"
        release(slow)
        assert (await event(response))[0] == "loaded"


async def test_load_continues_after_its_client_disconnects_and_another_client_sees_its_progress(
    node: Node, tmp_path: Path
) -> None:
    slow = make_model(tmp_path, "slow")
    async with ask(node, slow) as response:
        await halfway(response)
        response.close()
    async with ask(node, slow) as response:
        assert await halfway(response) == {"stage": "weights", "fraction": 0.5}
        release(slow)
        failed, data = await event(response)
        assert (failed, data["status"]) == ("error", 400)
        assert "already loaded" in data["error"]
    assert starts(slow) == 1
    assert (await node.get("/models"))[1][0]["status"] == "loaded"


@pytest.mark.parametrize(
    ("behavior", "message"),
    [("bad-file", "the file is truncated"), ("no-memory", "memory"), ("crash", "cannot begin")],
)
async def test_load_stream_of_a_failed_load_ends_with_an_error_event(
    node: Node, tmp_path: Path, behavior: str, message: str
) -> None:
    model = make_model(tmp_path, f"slow.{behavior}")
    async with ask(node, model) as response:
        await halfway(response)
        release(model)
        name, data = await event(response)
    assert (name, data["status"]) == ("error", 400)
    assert message in data["error"]


async def test_load_with_an_invalid_source_gets_a_json_error_instead_of_a_stream(node: Node) -> None:
    async with node.session.post(f"{node.url}/models/load", json={"model_id": "nowhere:x", "stream": True}) as response:
        assert (response.status, response.content_type) == (422, "application/json")
        assert (await response.json())["error"]["kind"] == "invalid_source"


async def test_broken_driver_is_reported_in_the_load_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Accelerators(unavailable="reboot")
    monkeypatch.setattr(load_preparation, "accelerators", lambda: facts)
    async with running({"NEURON_HARNESS__TORCH__DEVICE": "cuda:0"}) as node:
        async with ask(node, make_model(tmp_path)) as response:
            assert (response.status, (await response.json())["code"]) == (503, "cuda_unavailable")
        text = await node.session.get(f"{node.url}/metrics")
        assert 'neuron_refusals_total{code="cuda_unavailable"} 1.0' in await text.text()


async def test_load_stream_ends_when_the_node_stops(tmp_path: Path) -> None:
    slow = make_model(tmp_path, "slow")
    async with running({}) as node:
        watching = asyncio.create_task(ask(node, slow).__aenter__())
        await until(slow.with_suffix(".starts").exists)
        response = await watching
        assert node.app is not None
        await node.app.state.registry.close()
        while (ended := await event(response))[0] == "progress":
            pass
        assert ended[1]["error"]["code"] == "shutting_down"
