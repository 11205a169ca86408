"""Management routes, health and error responses over a socket, and the `neuron` command."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import aiohttp
import psutil
import pytest
from yarl import URL

from helexa.neuron.cache_folder import saved_prompts
from neuron.fake_models import ENGINE, make_model, release, starts, until
from neuron.running_node import Node, running
from ports import free_port


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with running({"NEURON_PORT": "4711"}) as node:
        yield node


# --- the node itself


async def test_version_and_discovery_endpoints_describe_the_node(node: Node):
    _, version = await node.get("/version")
    assert version["package_version"] == "0.1.0"
    assert version["git_sha"]
    _, discovery = await node.get("/discovery")
    assert discovery["harnesses"] == ["torch"]
    assert discovery["hostname"] == socket.gethostname()
    assert discovery["max_prompt_tokens"] > 0
    assert discovery["max_tensor_parallel"] >= 1
    assert discovery["memory_total_mb"] > 0


async def test_node_without_models_is_ready(node: Node):
    code, health = await node.get("/health")
    assert code == 200
    assert health["activation"] == {"state": "ready", "pending": [], "completed": [], "failed": []}
    assert health["models"] == []


async def test_unknown_path_or_method_gets_an_error_object_with_its_code(node: Node):
    code, body = await node.get("/nowhere")
    assert (code, body["error"]["code"]) == (404, "not_found")
    code, body = await node.post("/health", {})
    assert (code, body["error"]["code"]) == (405, "method_not_allowed")


# --- models


async def test_health_lists_the_valid_prefix_keys_of_cached_prompts(node: Node, tmp_path: Path):
    await node.load(make_model(tmp_path))
    for name in ("0123456789abcdef", "not a name"):
        await node.post("/v1/completions", {"model": "org/tiny", "prompt": [1, 2]}, **{"x-helexa-prefix": name})
    (load,) = (await node.get("/health"))[1]["models"]
    assert (load["memory_prefixes"], load["disk_prefixes"]) == ([], ["0123456789abcdef"])


def save(folder: Path, model: str) -> None:
    folder.mkdir(parents=True)
    (folder / "model").write_text(model)
    (folder / "1-1.segment").write_bytes(bytes(100))


async def delete(node: Node, model: str) -> tuple[int, dict[str, object]]:
    async with node.session.delete(URL(f"{node.url}/models/{model}/prefix-cache", encoded=True)) as response:
        return response.status, await response.json()


async def test_clear_of_the_prefix_cache_empties_memory_and_disk_of_a_model(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path / "cache"))
    for name, model in {"one": "org/tiny", "two": "org/tiny", "three": "org/other"}.items():
        save(tmp_path / "cache/prompts" / name, model)
    await node.load(make_model(tmp_path))
    await node.post("/v1/completions", {"model": "org/tiny", "prompt": [1, 2]})
    metrics = (await node.read("/metrics"))[1]
    assert 'neuron_model_prefix_hits_total{model="org/tiny",tier="disk"} 2.0' in metrics
    assert 'neuron_model_prefix_tokens_total{model="org/tiny",tier="memory"} 800.0' in metrics
    assert 'neuron_model_prefix_read_seconds_total{model="org/tiny"} 0.25' in metrics
    assert await delete(node, "org/tiny") == (200, {"status": "cleared", "deleted_bytes": 200})
    assert [path.name for path in (tmp_path / "cache/prompts").iterdir()] == ["three"]
    assert await delete(node, "org/tiny") == (200, {"status": "cleared", "deleted_bytes": 0})
    assert await delete(node, "org%2Fother") == (200, {"status": "cleared", "deleted_bytes": 100})  # is not loaded
    assert (await delete(node, "org/other"))[0] == 404


async def test_clear_of_the_prefix_cache_deletes_prompts_that_a_model_saves_as_it_falls_asleep(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path / "cache"))
    path = make_model(tmp_path, "saves")
    await node.load(path)
    falling = asyncio.create_task(node.post("/models/sleep", {"model_id": "org/tiny"}))
    async with asyncio.timeout(60):
        while (await node.get("/models"))[1][0]["status"] != "sleeping":
            pass
    clearing = asyncio.create_task(delete(node, "org/tiny"))
    await asyncio.wait([clearing], timeout=0.2)
    assert not clearing.done() and not falling.done()
    release(path)
    assert await clearing == (200, {"status": "cleared", "deleted_bytes": 100})
    assert saved_prompts() == []
    assert (await falling)[0] == 200
    assert (await node.get("/health"))[1]["models"] == []


async def test_clear_of_the_prefix_cache_deletes_saved_prompts_of_a_quarantined_model(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path / "cache"))
    path = make_model(tmp_path)
    await node.load(path)
    path.with_suffix(".bad").touch()
    with suppress(aiohttp.ClientError):
        await node.post("/v1/completions", {"model": "org/tiny", "prompt": [2]})  # ends the engine
    async with asyncio.timeout(60):
        while (await node.get("/models"))[1][0]["status"] != "poisoned":
            pass
    assert await delete(node, "org/tiny") == (200, {"status": "cleared", "deleted_bytes": 0})
    save(tmp_path / "cache/prompts/one", "org/tiny")
    assert await delete(node, "org/tiny") == (200, {"status": "cleared", "deleted_bytes": 100})
    assert saved_prompts() == []


async def test_model_can_be_loaded_described_and_unloaded_through_the_management_api(node: Node, tmp_path: Path):
    assert await node.load(make_model(tmp_path)) == (200, {"status": "loaded"})
    _, (model,) = await node.get("/models")
    assert model == {
        "id": "org/tiny",
        "harness": "torch",
        "status": "loaded",
        "devices": [],
        "vram_used_mb": 0,
        "granted_mb": 0,
        "architecture": "fake",
        "capabilities": ["text"],
        "limit": {"context": 1024, "input": 768, "output": 256},
        "tool_call": False,
        "reasoning": False,
        "servable": {"ok": True},
    }
    _, health = await node.get("/health")
    assert [load["id"] for load in health["models"]] == ["org/tiny"]
    for written in ("org/tiny", quote("org/tiny", safe="")):
        assert await node.get(f"/models/{written}/endpoint") == (200, {"url": "http://localhost:4711"})
        assert await node.get(f"/models/{written}/capabilities") == (200, {"capabilities": ["text"]})
    assert await node.post("/models/unload", {"model_id": "org/tiny"}) == (200, {"status": "unloaded"})
    assert await node.get("/models") == (200, [])


async def test_load_request_can_set_the_tool_call_format(node: Node, tmp_path: Path):
    path = make_model(tmp_path)
    spec = {"model_id": "org/tiny", "source": f"file:{path}"}
    code, body = await node.post("/models/load", {**spec, "tool_parser": "latin"})
    assert code == 400 and "'latin'" in body["error"] and "hermes" in body["error"]
    assert (starts(path) if path.with_suffix(".starts").exists() else 0) == 0
    for name, calls in (("hermes", True), ("none", False)):
        assert (await node.post("/models/load", {**spec, "tool_parser": name}))[0] == 200
        assert (await node.get("/models"))[1][0]["tool_call"] is calls
        assert (await node.post("/models/unload", {"model_id": "org/tiny"}))[0] == 200


async def test_ten_concurrent_loads_start_one_engine(node: Node, tmp_path: Path):
    path = make_model(tmp_path)
    answers = await asyncio.gather(*(node.load(path) for _ in range(10)))
    assert sorted(code for code, _ in answers) == [200] + [400] * 9
    assert all("already loaded" in body["error"] for code, body in answers if code == 400)
    assert starts(path) == 1


async def test_models_and_health_respond_during_a_load(node: Node, tmp_path: Path):
    slow = make_model(tmp_path, "slow")
    loading = asyncio.create_task(node.load(slow))
    await until(slow.with_suffix(".starts").exists)
    _, (arriving,) = await node.get("/models")
    assert (arriving["id"], arriving["status"]) == ("org/tiny", "loading") and arriving["stage"]
    code, body = await node.get("/models/org/tiny/endpoint")
    assert (code, "is loading" in body["error"]) == (503, True)
    assert not loading.done()
    release(slow)
    assert (await loading)[0] == 200


@pytest.mark.parametrize("behavior", ["bad-file", "no-memory", "crash"])
async def test_failed_load_is_400_with_the_error_as_a_string(node: Node, tmp_path: Path, behavior: str):
    code, body = await node.load(make_model(tmp_path, behavior))
    assert code == 400
    assert isinstance(body["error"], str)
    assert "Traceback" not in body["error"]


async def test_load_from_a_missing_file_is_422_with_the_error_kind_invalid_source(node: Node, tmp_path: Path):
    code, body = await node.load(tmp_path / "absent.gguf")
    assert code == 422
    assert body["error"]["kind"] == "invalid_source"
    assert "does not exist" in body["error"]["message"]


async def test_load_with_too_many_ranks_is_rejected_before_an_engine_starts(node: Node, tmp_path: Path):
    path = make_model(tmp_path)
    (path / "config.json").write_text('{"num_attention_heads": 1}')
    for source, ranks in ((tmp_path / "absent", 9999), (path, 2)):
        spec = {"model_id": "org/tiny", "source": f"file:{source}", "tensor_parallel": ranks}
        code, body = await node.post("/models/load", spec)
        error = body["error"]
        assert (code, error["kind"]) == (422, "tensor_parallel_unsupported")
        assert (error["model_id"], error["tp_size"]) == ("org/tiny", ranks)
        assert error["suggestion"] == f"set tensor_parallel to at most {error['max_tensor_parallel']}"
    assert error["heads"] == 1
    assert not path.with_suffix(".starts").exists()


async def test_number_of_ranks_of_a_loaded_model_is_listed(node: Node, tmp_path: Path):
    spec = {"model_id": "org/tiny", "source": f"file:{make_model(tmp_path)}", "tensor_parallel": 2}
    assert await node.post("/models/load", spec) == (200, {"status": "loaded"})
    _, (model,) = await node.get("/models")
    assert model["tensor_parallel"] == 2


async def test_unknown_model_is_404_with_the_error_as_a_string(node: Node):
    for code, body in (
        await node.get("/models/org%2Ftiny/endpoint"),
        await node.get("/models/org/tiny/capabilities"),
        await node.post("/models/unload", {"model_id": "org/tiny"}),
    ):
        assert code == 404
        assert "org/tiny" in body["error"]


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, "malformed_json"),
        (b"[]", {}, 400, "invalid_request_body"),
        (b'{"model_id": ""}', {}, 400, "invalid_request_body"),
        (rb'{"model_id": "a\nb"}', {}, 400, "invalid_request_body"),
        (b'{"model_id": "a", "devices": "all"}', {}, 400, "invalid_request_body"),
        (b'{"model_id": "%s"}' % (b"a" * 1001), {}, 400, "invalid_request_body"),
        (b'{"model_id": "a", "source": "%s"}' % (b"a" * 1001), {}, 400, "invalid_request_body"),
        (b'{"model_id": "a", "quant": "%s"}' % (b"a" * 1001), {}, 400, "invalid_request_body"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
    ],
)
async def test_invalid_request_body_gets_an_error_object_with_its_code(
    node: Node, body: bytes, headers: dict, status: int, code: str
):
    answered, answer = await node.post("/models/load", body, **headers)
    assert (answered, answer["error"]["code"]) == (status, code)


async def test_node_responds_while_default_models_load(tmp_path: Path):
    slow = make_model(tmp_path, "slow")
    models = f'[{{model_id = "org/slow", source = "file:{slow}"}}]'
    async with running({"NEURON_DEFAULT_MODELS": models}) as node:
        _, health = await node.get("/health")
        assert health["activation"]["state"] == "pre_warming"
        assert health["activation"]["in_progress"] == "org/slow"
        code, readiness = await node.get("/health/ready")
        assert (code, readiness["components"]["models"]["ready"]) == (503, False)
        release(slow)
        while health["activation"]["state"] != "ready":
            _, health = await node.get("/health")
        assert health["activation"]["completed"] == ["org/slow"]
        assert (await node.get("/health/ready"))[0] == 200


async def test_shutdown_of_the_node_ends_the_running_load_of_a_default_model(tmp_path: Path):
    slow = make_model(tmp_path, "slow")
    models = f'[{{model_id = "org/slow", source = "file:{slow}"}}]'
    async with running({"NEURON_DEFAULT_MODELS": models}):
        await until(slow.with_suffix(".starts").exists)


# --- the command


def python(*arguments: str, fds: tuple[int, ...] = (), **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=fds,
        env=os.environ | environ,
    )


def neuron(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    return python("-m", "helexa.neuron", *arguments, fds=(), **environ)


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def test_node_whose_port_is_in_use_prints_one_error_line():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, _, errors = finished(neuron("--host", "127.0.0.1", "--port", str(port)))
    assert code == 78
    assert errors.startswith(f"neuron: port {port} is in use by another process; ")
    assert errors.count("\n") == 1


def test_node_with_an_invalid_configuration_prints_one_error_line(tmp_path: Path):
    path = tmp_path / "neuron.toml"
    path.write_text("[harness.torch]\nmax_sequence = 3\n")
    code, _, errors = finished(neuron("-c", str(path)))
    assert code == 78
    assert "did you mean 'max_sequences'?" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_an_idle_node_with_exit_code_0(which: signal.Signals):
    port = free_port()
    process = neuron("--host", "127.0.0.1", "--port", str(port))
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"http://127.0.0.1:{port}/health") as response:
                    assert response.status == 200
                break
            except aiohttp.ClientConnectionError:
                assert process.poll() is None, process.communicate()
                await asyncio.sleep(0.05)
    process.send_signal(which)
    code, _, errors = await asyncio.to_thread(finished, process)
    assert code == 0, errors
    assert "Traceback" not in errors


@asynccontextmanager
async def node_with_an_endless_stream(
    tmp_path: Path, model: str = "well-behaved"
) -> AsyncIterator[tuple[subprocess.Popen[str], Node, aiohttp.ClientResponse]]:
    """Run a node process with a fake engine and an open stream without end."""
    script = (
        "import asyncio, socket, sys\n"
        "from functools import partial\n"
        "from helexa.neuron import app\n"
        "from helexa.neuron.config import read_config\n"
        "from helexa.neuron.engine_client.process_and_standby import Child\n"
        "from helexa.neuron.engine_client.process_and_standby import WarmStandby\n"
        "listener = socket.socket(fileno=int(sys.argv[1]))\n"
        "standby = WarmStandby(partial(Child.spawn, sys.argv[2:]))\n"
        "config = read_config(None, {'NEURON_DRAIN_SECS': '1'})\n"
        "def read():\n"
        "    return read_config(None, {'NEURON_API_KEY': 'a-new-key'})\n"
        "node = app.create_app(config, standby=standby)\n"
        "asyncio.run(app.NodeServer(node, config, read).serve(listener))\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        process = python("-c", script, str(listener.fileno()), *ENGINE, fds=(listener.fileno(),))
    async with aiohttp.ClientSession() as session:
        node = Node(url, session)
        assert (await node.load(make_model(tmp_path, model)))[0] == 200
        endless = {"model": "org/tiny", "prompt": [3], "stream": True}
        async with session.post(f"{url}/v1/completions", json=endless) as response:
            assert response.status == 200
            await response.content.readany()
            yield process, node, response


async def test_sighup_reloads_the_configuration_without_interrupting_requests(tmp_path: Path):
    async with node_with_an_endless_stream(tmp_path) as (process, node, response):
        process.send_signal(signal.SIGHUP)
        while (await node.get("/models"))[0] == 200:
            pass
        node.session.headers["authorization"] = "Bearer a-new-key"
        code, models = await node.get("/models")
        assert (code, [model["status"] for model in models]) == (200, ["loaded"])
        assert await response.content.readany()
        process.send_signal(signal.SIGTERM)
        await response.content.read()
    code, _, errors = await asyncio.to_thread(finished, process)
    assert code == 0, errors
    assert "setting reloaded setting=api_key" in errors
    assert "a-new-key" not in errors


async def test_sigterm_ends_running_streams_and_the_node_exits_with_code_0(tmp_path: Path):
    async with node_with_an_endless_stream(tmp_path) as (process, node, response):
        process.send_signal(signal.SIGTERM)
        # New requests are rejected during the drain.
        while (refused := await node.post("/v1/completions", {"model": "org/tiny", "prompt": [1, 3]}))[0] == 200:
            pass
        assert (refused[0], refused[1]["error"]["code"]) == (503, "shutting_down")
        code, readiness = await node.get("/health/ready")
        assert (code, readiness["components"]["node"]["ready"]) == (503, False)
        rest = await response.content.read()
    assert b"shutting down" in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    code, _, errors = await asyncio.to_thread(finished, process)
    assert code == 0, errors
    assert "Traceback" not in errors


async def test_second_signal_stops_the_node_at_once_and_leaves_no_child_processes(tmp_path: Path):
    async with node_with_an_endless_stream(tmp_path, "deaf") as (process, node, response):
        children = psutil.Process(process.pid).children(recursive=True)
        assert any("fake_engine.py" in " ".join(child.cmdline()) for child in children)
        process.send_signal(signal.SIGTERM)
        while (await node.post("/v1/completions", {"model": "org/tiny", "prompt": [1, 3]}))[0] == 200:
            pass
        process.send_signal(signal.SIGTERM)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    code, _, errors = await asyncio.to_thread(finished, process)
    assert code == 1, errors
    _, left = await asyncio.to_thread(psutil.wait_procs, children, 60)
    assert left == []


def test_option_help_imports_no_slow_modules():
    script = (
        "import sys\n"
        "from helexa.neuron.cli import app\n"
        "app(['--help'], exit_on_error=False, result_action='return_value')\n"
        "print([name for name in ('torch', 'pydantic', 'starlette', 'huggingface_hub') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("[]\n")


def test_server_process_of_the_node_imports_neither_torch_nor_huggingface_hub():
    script = (
        "import sys, helexa.neuron.app\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'huggingface_hub') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
