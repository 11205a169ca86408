"""Model list, health, node list, metrics and error responses of the HTTP API."""

import gzip
import json
import logging
from io import BytesIO
from typing import Any

import aiohttp
import pytest

from cortex.fake_node import FakeNode
from cortex.running_gateway import JSON_HEADERS, Cortex, eventually, running_cortex
from helexa.core.catalog import Catalog
from helexa.core.node_reports import Discovery, Health, ModelInfo
from helexa.cortex.api.listings import model_list
from helexa.cortex.fleet.fleet import FleetView, Node
from helexa.cortex.routes.health_usage_costs_and_activity import fleet_health

CPU = Discovery(hostname="h", os="Linux")


def node(name: str, *models: dict[str, Any], healthy: bool = True, **fields: Any) -> Node:
    by_id = {model["id"]: ModelInfo.model_validate(model) for model in models}
    return Node(name, f"http://{name}", healthy=healthy, models=by_id, discovery=CPU, **fields)


def listed(*nodes: Node, **catalog: Any) -> dict[str, Any]:
    entries = model_list(FleetView(nodes), Catalog.model_validate(catalog), 1760000000)
    return {entry["id"]: entry for entry in entries}


def test_model_list_entry_has_all_documented_fields() -> None:
    model = {
        "id": "Org/M",
        "capabilities": ["text", "vision"],
        "limit": {"context": 131072, "input": 122880, "output": 8192},
        "tool_call": True,
    }
    profile = {"id": "Org/M", "capabilities": ["text"], "cost": {"input": 0.0, "output": 0.5}, "limit": {"context": 9}}
    assert listed(node("n1", model), models=[profile]) == {
        "Org/M": {
            "id": "Org/M",
            "object": "model",
            "created": 1760000000,
            "owned_by": "helexa",
            "loaded": True,
            "state": "warm",
            "feasible_on": ["n1"],
            "locations": [{"node": "n1", "status": "loaded", "vram_estimate_mb": None}],
            "capabilities": ["text", "vision"],
            "limit": {"context": 131072, "input": 122880, "output": 8192},
            "cost": {"input": 0.0, "output": 0.5},
            "tool_call": True,
            "reasoning": False,
            "max_model_len": 131072,
            "max_input_tokens": 122880,
            "max_output_tokens": 8192,
        }
    }


def test_model_list_has_limits_of_the_catalog_until_a_node_reports_its_own() -> None:
    profile = {"id": "M", "limit": {"context": 9, "output": 4}}
    assert listed(node("n1"), models=[profile])["M"]["max_model_len"] == 9
    assert listed(node("n1", {"id": "M", "limit": {"context": 5}}), models=[profile])["M"]["limit"] == {"context": 5}


def test_unknown_limits_and_costs_are_omitted_from_the_model_list() -> None:
    cold = listed(node("n1"), models=[{"id": "M", "capabilities": ["text"]}])["M"]
    assert not {"limit", "cost", "max_model_len", "max_input_tokens", "max_output_tokens"} & set(cold)
    assert (cold["loaded"], cold["locations"], cold["capabilities"]) == (False, [], ["text"])
    partly = listed(node("n1", {"id": "M", "limit": {"context": 5}}))["M"]
    assert (partly["limit"], partly["max_model_len"]) == ({"context": 5}, 5)
    assert not {"max_input_tokens", "max_output_tokens"} & set(partly)


def test_model_on_several_nodes_is_listed_with_the_lowest_context_limit() -> None:
    on_a = {"id": "M", "capabilities": ["text"], "limit": {"context": 9000, "output": 10}, "status": "recovering"}
    on_b = {"id": "M", "capabilities": ["vision", "text"], "limit": {"context": 4000}, "reasoning": True}
    entry = listed(node("a", on_a), node("b", on_b), node("c", healthy=False), models=[{"id": "M"}])["M"]
    assert entry["limit"] == {"context": 4000}
    assert "max_output_tokens" not in entry
    assert (entry["capabilities"], entry["reasoning"], entry["loaded"]) == (["text", "vision"], True, True)
    assert [place["status"] for place in entry["locations"]] == ["recovering", "loaded"]
    assert entry["feasible_on"] == ["a", "b"]


def test_models_that_a_node_loads_at_its_start_are_listed_as_loading() -> None:
    activation = {"activation": {"state": "pre_warming", "in_progress": "A", "pending": ["B"]}}
    entries = listed(node("n1", {"id": "A"}, health=Health.model_validate(activation)))
    assert [place["status"] for place in entries["A"]["locations"]] == ["loaded"]
    assert entries["B"]["locations"] == [{"node": "n1", "status": "loading", "vram_estimate_mb": None}]


def test_alias_is_listed_like_its_model_and_an_alias_of_no_model_is_omitted() -> None:
    entries = listed(node("n1", {"id": "M"}), aliases={"m": "M", "hop": "m", "lost": "Nobody"})
    assert set(entries) == {"M", "m"}
    assert entries["m"] == entries["M"] | {"id": "m", "alias_of": "M"}


def test_health_status_is_degraded_impaired_or_ok_depending_on_nodes_and_models() -> None:
    broken = {"id": "M", "servable": {"ok": False, "reason": "insufficient_vram", "detail": "1405 MiB free"}}
    assert fleet_health(FleetView((node("a", broken, healthy=False),))) == {
        "status": "degraded",
        "nodes": {"healthy": 0, "total": 1},
    }
    assert fleet_health(FleetView((node("a", broken), node("b", broken, healthy=False)))) == {
        "status": "impaired",
        "nodes": {"healthy": 1, "total": 2},
        "unservable": [{"node": "a", "model": "M", "reason": "insufficient_vram", "detail": "1405 MiB free"}],
    }
    assert fleet_health(FleetView((node("a", {"id": "M"}),))) == {"status": "ok", "nodes": {"healthy": 1, "total": 1}}


async def test_models_are_listed_and_retrieved_by_id(cortex: Cortex) -> None:
    models = await cortex.get("/v1/models")
    assert models["object"] == "list"
    assert [entry["id"] for entry in models["data"]] == ["Org/M", "small"]
    assert (await cortex.get("/v1/models/Org/M"))["id"] == "Org/M"
    assert (await cortex.get("/v1/models/Org%2FM"))["id"] == "Org/M"
    assert (await cortex.get("/v1/models/Org/M:latest"))["id"] == "Org/M"  # a name that chats accept, too
    assert (await cortex.get("/v1/models/nobody"))["error"]["code"] == "model_not_found"


async def test_root_path_returns_the_same_as_the_health_endpoint(cortex: Cortex) -> None:
    assert await cortex.get("/") == await cortex.get("/health") == {"status": "ok", "nodes": {"healthy": 1, "total": 1}}


async def test_node_list_shows_discovery_health_and_load_of_each_node() -> None:
    load = {"id": "Org/M", "in_flight": 2}
    health = {"devices": [{"index": 0, "vram_used_mb": 1, "vram_free_mb": 2}], "models": [load]}
    async with (
        FakeNode("up", health=health).holds("Org/M").serving() as up,
        FakeNode("down", down=True).serving() as down,
        running_cortex(up, down, ready=False) as cortex,
    ):

        async def one_is_up() -> bool:
            return (await cortex.get("/health"))["nodes"]["healthy"] == 1

        await eventually(one_is_up)
        first, second = (await cortex.get("/api/nodes"))["nodes"]
    assert second.items() >= {"name": "down", "endpoint": down.url, "healthy": False, "models": []}.items()
    assert not second.keys() & {"discovery", "devices", "load", "activation"}
    assert (first["name"], first["endpoint"], first["healthy"]) == ("up", up.url, True)
    assert first["discovery"]["memory_total_mb"] == 999
    assert [model["id"] for model in first["models"]] == ["Org/M"]
    assert first["activation"]["state"] == "ready"
    assert first["devices"][0]["vram_free_mb"] == 2
    assert (first["load"][0]["id"], first["load"][0]["in_flight"]) == ("Org/M", 2)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{nonsense", 400, "malformed_json"),
        (b"", 400, "malformed_json"),
        (b'{"model":"\xff"}', 400, "malformed_json"),
        (b"[" * 5000, 400, "malformed_json"),
        (b"[1]", 400, "invalid_request_body"),
        (b"null", 400, "invalid_request_body"),
        (b"{}", 400, "missing_model_field"),
        (b'{"model":7}', 400, "missing_model_field"),
        (b'{"model":null}', 400, "missing_model_field"),
        (b'{"model":""}', 400, "missing_model_field"),
        (b'{"model":"nobody"}', 404, "model_not_found"),
        (b'{"model":"lost"}', 404, "model_not_found"),
    ],
)
async def test_invalid_body_is_rejected_with_an_error_object(
    cortex: Cortex, body: bytes, status: int, code: str
) -> None:
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", data=body) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert await cortex.sample("cortex_requests_total", model="unknown", node="none") == 1
    assert (await cortex.ask())[0] == 200


async def test_content_length_above_the_limit_is_413(cortex: Cortex, node: FakeNode) -> None:
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", data=BytesIO(bytes((2 << 20) + 1))) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (413, "request_too_large")
    assert node.bodies == []


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 200), ("/v1/messages", 200)])
async def test_compressed_body_is_forwarded_decompressed(
    cortex: Cortex, node: FakeNode, path: str, status: int
) -> None:
    fields = {"model": "Org/M", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    body, headers = gzip.compress(json.dumps(fields).encode()), {**JSON_HEADERS, "content-encoding": "gzip"}
    async with cortex.client.post(cortex.url + path, data=body, headers=headers) as response:
        assert response.status == status
    [received] = node.bodies
    assert json.loads(received)["messages"] == fields["messages"]


async def test_compressed_body_above_the_limit_is_413(cortex: Cortex) -> None:
    body, headers = gzip.compress(bytes(3 << 20)), {**JSON_HEADERS, "content-encoding": "gzip"}
    assert len(body) < 100_000
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", data=body, headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (413, "request_too_large")


async def test_unknown_content_encoding_is_415_and_lists_the_supported_encodings(cortex: Cortex) -> None:
    headers = {**JSON_HEADERS, "content-encoding": "br"}
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"):
        async with cortex.client.post(cortex.url + path, data=b"x", headers=headers) as response:
            assert response.status == 415
            assert response.headers["accept-encoding"].startswith("gzip, deflate")


async def test_chunked_body_above_the_limit_is_413(cortex: Cortex) -> None:
    async def chunks() -> Any:
        for _ in range(33):
            yield b" " * (1 << 16)

    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", data=chunks()) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (413, "request_too_large")


async def test_body_at_the_size_limit_is_forwarded(cortex: Cortex, node: FakeNode) -> None:
    body = json.dumps({"model": "Org/M"}).encode().ljust(2 << 20)
    async with cortex.client.post(f"{cortex.url}/v1/chat/completions", data=BytesIO(body)) as response:
        assert response.status == 200
    assert node.bodies == [body]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_path"),
        ("POST", "/v1/chat/nothing", 404, "unknown_path"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_unknown_path_or_method_is_rejected_with_an_error_object(
    cortex: Cortex, method: str, path: str, status: int, code: str
) -> None:
    async with cortex.client.request(method, cortex.url + path, allow_redirects=False) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (status, code)
        assert ("allow" in response.headers) is (status == 405)


async def test_metrics_count_requests_and_tokens_per_model_and_node(cortex: Cortex) -> None:
    assert (await cortex.ask("small", stream=True))[0] == 200
    assert (await cortex.ask())[0] == 200
    async with cortex.client.get(cortex.metrics_url) as response:
        assert response.headers["content-type"].startswith("text/plain")
        text = await response.text()
    assert 'cortex_request_duration_seconds_bucket{le="0.1",model="Org/M",node="n1"}' in text
    assert 'cortex_time_to_first_token_seconds_bucket{le="0.05",model="Org/M",node="n1"}' in text
    assert 'cortex_tokens_per_second_bucket{le="200.0",model="Org/M",node="n1"}' in text
    labels = {"model": "Org/M", "node": "n1"}
    assert await cortex.sample("cortex_requests_total", **labels) == 2
    assert await cortex.sample("cortex_request_errors_total", **labels) == 0
    assert await cortex.sample("cortex_prompt_tokens_total", **labels) == 14
    assert await cortex.sample("cortex_completion_tokens_total", **labels) == 4
    assert await cortex.sample("cortex_cached_prompt_tokens_total", **labels) == 6
    assert await cortex.sample("cortex_request_duration_seconds_count", **labels) == 2
    assert await cortex.sample("cortex_time_to_first_token_seconds_count", **labels) == 1
    assert await cortex.sample("cortex_tokens_per_second_count", **labels) == 2


async def test_requests_for_unknown_models_create_no_new_metric_series(cortex: Cortex) -> None:
    for name in ("one", "two", "three"):
        assert (await cortex.ask(name))[0] == 404
    async with cortex.client.get(cortex.metrics_url) as response:
        text = await response.text()
    assert not {"one", "two", "three"} & set(text.replace('"', " ").split())
    assert await cortex.sample("cortex_request_errors_total", model="unknown", node="none") == 3


async def test_responses_to_requests_on_one_connection_do_not_mix(cortex: Cortex) -> None:
    async with aiohttp.ClientSession(headers=JSON_HEADERS, connector=aiohttp.TCPConnector(limit=1)) as client:
        for _ in range(3):
            async with client.post(f"{cortex.url}/v1/chat/completions", data=b'{"model":"Org/M"}') as response:
                assert (await response.json())["object"] == "chat.completion"
            async with client.post(f"{cortex.url}/v1/chat/completions", data=b"{") as response:
                assert response.status == 400


async def test_log_of_a_404_names_the_requested_model(cortex: Cortex, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert (await cortex.ask("no/such model\n" + "x" * 1000))[0] == 404
    await eventually(lambda: "code=model_not_found" in caplog.text)
    [line] = [record.getMessage() for record in caplog.records if record.name == "helexa.cortex.requests"]
    assert "model=unknown requested='no/such model\\nxxx" in line
    assert len(line) < 600
