"""Every request has an id, one log line and an entry in the metrics."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from helexa.neuron.requests.prompt_images_and_thinking import enable_prompt_log
from neuron.fake_models import make_model
from neuron.running_node import Node, running


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with running({}) as node:
        yield node


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    prefixes = ("answered ", "completed ", "refused ", "failed ")
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= level and record.getMessage().startswith(prefixes)
    ]


async def sample(node: Node, series: str) -> float:
    _, text = await node.read("/metrics")
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{series} ")), 0.0)


@pytest.mark.parametrize("sent_id", ["abc", "A.b_c-1", None, "a b", "x" * 129])
async def test_response_has_the_valid_request_id_of_the_client_or_a_generated_id(
    node: Node, sent_id: str | None
) -> None:
    for path in ("/health", "/nowhere", "/models/load", "/v1/models"):
        headers = {} if sent_id is None else {"x-request-id": sent_id}
        async with node.session.get(node.url + path, headers=headers) as response:
            (number,) = response.headers.getall("x-request-id")
        assert number == sent_id if sent_id in ("abc", "A.b_c-1") else number and number != sent_id


async def test_each_request_has_one_log_line(node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "helexa")
    await node.load(make_model(tmp_path))
    completion = {"model": "org/tiny", "prompt": [1, 3]}
    for request, beginning in (
        (node.get("/v1/models"), "answered method=GET path=/v1/models status=200 duration_ms="),
        (
            node.post("/tokenize", {"model": "org/tiny", "prompt": "a"}),
            "answered method=POST path=/tokenize status=200",
        ),
        (node.post("/v1/completions", completion), "completed model=org/tiny prompt_tokens=2 completion_tokens=3"),
        (node.post("/v1/completions", completion | {"stream": 1}), "refused path=/v1/completions status=400"),
        (node.post("/v1/completions", completion | {"model": "x"}), "refused path=/v1/completions status=404"),
        (node.post("/models/unload", {"model_id": "x"}), "refused path=/models/unload status=404 code=model_not_found"),
        (node.get("/nowhere%20else"), "refused path='/nowhere else' status=404 type=invalid_request_error"),
        (node.post("/health", {}), "refused path=/health status=405"),
        (node.post("/models/unload", {"model_id": "org/tiny"}), "answered method=POST path=/models/unload status=200"),
    ):
        caplog.clear()
        await request
        (line,) = lines(caplog)
        assert line.startswith(beginning)


async def test_log_lines_from_the_engine_process_keep_their_log_level(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "helexa")
    await node.load(make_model(tmp_path, "crash"))
    logged = [
        (record.levelname, record.getMessage().partition(": ")[2])
        for record in caplog.records
        if record.getMessage().startswith("engine pid=")
    ]
    assert logged == [("WARNING", "fake.engine: this will not end well"), ("INFO", "cannot begin")]


@pytest.mark.parametrize("enabled", [False, True])
async def test_prompts_are_logged_only_if_enabled(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    logger = logging.getLogger("helexa.neuron.prompts")
    monkeypatch.setattr(logger, "disabled", True)
    if enabled:
        enable_prompt_log()
    caplog.set_level(logging.DEBUG)
    await node.load(make_model(tmp_path))
    await node.post("/v1/completions", {"model": "org/tiny", "prompt": [1, 3]})
    prompts = [record.getMessage() for record in caplog.records if record.name == logger.name]
    assert [line.partition(" text=")[0] for line in prompts[-1:]] == (["prompt model=org/tiny tokens=2"] * enabled)


async def test_polling_requests_are_logged_only_at_debug_level(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "helexa")
    await node.get("/health")
    assert lines(caplog) == []
    assert len(lines(caplog, logging.DEBUG)) == 1


async def test_metrics_report_tokens_times_and_memory_of_a_request(node: Node, tmp_path: Path) -> None:
    await node.load(make_model(tmp_path))
    assert (await node.post("/v1/completions", {"model": "org/tiny", "prompt": [6, 4]}))[0] == 200
    _, text = await node.read("/metrics")
    for line in (
        'neuron_requests_total{route="/v1/completions",status="200"} 1.0',
        'neuron_runs_total{finish_reason="length",model="org/tiny"} 1.0',
        'neuron_prompt_tokens_total{model="org/tiny"} 2.0',
        'neuron_cached_prompt_tokens_total{model="org/tiny"} 12.0',
        'neuron_completion_tokens_total{model="org/tiny"} 4.0',
        'neuron_time_to_first_token_seconds_count{model="org/tiny"} 1.0',
        'neuron_queue_seconds_bucket{le="+Inf",model="org/tiny"} 1.0',
        'neuron_prefill_seconds_bucket{le="0.01",model="org/tiny"} 1.0',
        'neuron_prefill_seconds_bucket{le="0.005",model="org/tiny"} 0.0',
        'neuron_decode_seconds_sum{model="org/tiny"} 0.02',
        'neuron_time_per_output_token_seconds_count{model="org/tiny"} 1.0',
        'neuron_model_up{model="org/tiny"} 1.0',
        'neuron_model_kv_pages{model="org/tiny"} 100.0',
        'neuron_model_kv_pages_free{model="org/tiny"} 90.0',
        'neuron_model_kv_usage_ratio{model="org/tiny"} 0.1',
    ):
        assert line in text.splitlines(), line
    budget_mib = await sample(node, 'neuron_model_kv_budget_mib{model="org/tiny"}')
    assert await sample(node, 'neuron_model_kv_budget_bytes{model="org/tiny"}') == budget_mib * 2**20 > 0
    assert await sample(node, "process_resident_memory_bytes") > 0
    assert await sample(node, "neuron_memory_total_bytes") > await sample(node, "neuron_memory_free_bytes") > 0


async def test_metrics_count_errors_by_code_and_all_unknown_paths_as_one_route(node: Node) -> None:
    await node.get("/a")
    await node.get("/b")
    await node.post("/v1/chat/completions", b"{")
    await node.post("/models/load", {"model_id": "nowhere:x"})
    assert await sample(node, 'neuron_requests_total{route="other",status="404"}') == 2
    assert await sample(node, 'neuron_refusals_total{code="not_found"}') == 2
    assert await sample(node, 'neuron_refusals_total{code="malformed_json"}') == 1
    assert await sample(node, 'neuron_refusals_total{code="invalid_source"}') == 1


async def test_metrics_count_model_events_such_as_loads_and_crashes(node: Node, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    await node.load(make_model(tmp_path))
    await node.load(make_model(tmp_path / "second", "bad-file"), "org/bad")
    await node.post("/v1/completions", {"model": "org/tiny", "prompt": [2]})
    counts = {"loads": 1, "failed_loads": 1, "unloads": 0, "engine_deaths": 1}
    for event, count in counts.items():
        while await sample(node, f'neuron_model_events_total{{event="{event}"}}') < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await sample(node, f'neuron_model_events_total{{event="{event}"}}') == count


async def test_metrics_count_a_disconnect_as_a_canceled_request(node: Node, tmp_path: Path) -> None:
    await node.load(make_model(tmp_path))
    request = {"model": "org/tiny", "prompt": [3], "stream": True}
    async with node.session.post(f"{node.url}/v1/completions", json=request) as response:
        await response.content.readany()
        response.close()
    while not await sample(node, 'neuron_runs_total{finish_reason="cancelled",model="org/tiny"}'):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
