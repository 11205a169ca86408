"""Metrics of the gateway and of its nodes."""

import aiohttp

from cortex.fake_node import FakeNode
from cortex.running_gateway import JSON_HEADERS, Cortex, eventually, running_cortex
from helexa.cortex.request_record import RequestRecord

LOAD = {
    "id": "Org/M",
    "in_flight": 3,
    "queue_depth": 2,
    "max_in_flight": 8,
    "anon_in_flight": 1,
    "rejected_queue_full": 4,
    "rejected_anon_yield": 5,
    "tok_s_decode": 12.5,
}
DEVICE = {"index": 1, "vram_used_mb": 900, "vram_free_mb": 100, "utilization_pct": 50, "temp_c": 60}


async def test_metrics_report_the_load_and_devices_of_each_node(node: FakeNode) -> None:
    node.health = {"devices": [DEVICE], "models": [LOAD]}
    labels_text = 'node="n1",model="Org/M"'
    wanted = {
        ("cortex_model_in_flight", labels_text): 3.0,
        ("cortex_model_queue_depth", labels_text): 2.0,
        ("cortex_model_max_in_flight", labels_text): 8.0,
        ("cortex_model_anon_in_flight", labels_text): 1.0,
        ("cortex_model_tok_s_decode", labels_text): 12.5,
        ("cortex_model_rejections_total", 'model="Org/M",node="n1",reason="queue_full"'): 4.0,
        ("cortex_model_rejections_total", 'model="Org/M",node="n1",reason="anon_yield"'): 5.0,
        ("cortex_device_vram_free_mb", 'device="1",node="n1"'): 100.0,
        ("cortex_device_memory_free_bytes", 'device="1",node="n1"'): 100.0 * 2**20,
        ("cortex_device_utilization_ratio", 'device="1",node="n1"'): 0.5,
        ("cortex_device_temperature_celsius", 'device="1",node="n1"'): 60.0,
        ("cortex_device_temp_c", 'device="1",node="n1"'): 60.0,
        ("cortex_node_up", 'node="n1"'): 1.0,
        ("cortex_model_avoided", 'node="n1",model="Org/M",reason="failing"'): 0.0,
        ("cortex_model_avoided", 'node="n1",model="Org/M",reason="ejected"'): 0.0,
        ("cortex_ledger_up", ""): 1.0,
        ("cortex_draining", ""): 0.0,
        ("cortex_requests_running", ""): 0.0,
    }
    wanted = {(name, ",".join(sorted(labels.split(",")))): value for (name, labels), value in wanted.items()}
    async with running_cortex(node) as cortex:

        async def is_reported() -> bool:
            async with cortex.client.get(cortex.metrics_url) as response:
                return "cortex_model_in_flight{" in await response.text()

        await eventually(is_reported)
        assert await read_samples(cortex, wanted) == wanted
        async with cortex.client.get(cortex.metrics_url) as response:
            text = await response.text()
        assert "cortex_model_max_queue_depth{" not in text  # the node did not report it
        node.down = True

        async def is_removed() -> bool:
            async with cortex.client.get(cortex.metrics_url) as response:
                return "cortex_model_in_flight{" not in await response.text()

        await eventually(is_removed)


async def read_samples(cortex: Cortex, wanted: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """Return the values of the samples in `wanted`, with their labels in alphabetical order."""
    async with cortex.client.get(cortex.metrics_url) as response:
        lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]
    samples: dict[tuple[str, str], float] = {}
    for line in lines:
        head, value = line.rsplit(" ", 1)
        name, _, labels = head.rstrip("}").partition("{")
        key = (name, ",".join(sorted(labels.split(","))))
        if key in wanted:
            samples[key] = float(value)
    return samples


async def test_metrics_contain_latency_histograms_and_the_gateway_overhead(cortex: Cortex) -> None:
    await cortex.ask(stream=True)
    async with cortex.client.get(cortex.metrics_url) as response:
        text = await response.text()
    for name in ("request_duration_seconds", "time_to_first_token_seconds", "gateway_overhead_seconds"):
        assert f"cortex_{name}_bucket{{" in text
        assert f'cortex_{name}_count{{model="Org/M",node="n1"}} 1.0' in text or f"cortex_{name}_count 1.0" in text


async def test_metrics_of_unknown_models_share_one_label(cortex: Cortex) -> None:
    for number in range(20):
        await cortex.ask(f"nobody/{number}")
    async with cortex.client.get(cortex.metrics_url) as response:
        text = await response.text()
    assert "nobody" not in text
    assert 'cortex_requests_total{model="unknown",node="none"} 20.0' in text


def test_activity_log_shows_the_requested_name_of_an_unknown_model() -> None:
    assert RequestRecord(name="nobody/1").activity().model == "nobody/1"
    assert RequestRecord(name="nobody/1").activity().alias is None
    assert RequestRecord(name="n" * 5000).activity().model == "n" * 200
    assert RequestRecord().activity().model == "unknown"
    record = RequestRecord(name="small", model="Org/M").activity()
    assert (record.model, record.alias) == ("Org/M", "small")


async def test_metrics_endpoint_needs_no_key(node: FakeNode) -> None:
    async with (
        running_cortex(node, ready=False, settings={"entitlements": {"require_auth": True}}) as cortex,
        aiohttp.ClientSession(headers=JSON_HEADERS) as client,
        client.get(cortex.metrics_url) as response,
    ):
        assert response.status == 200
