"""`neuron doctor` as a process: what it finds, and what its exit code makes of that."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helexa.neuron.ops.cpu import CpuOps
from helexa.neuron.ops.reference import ReferenceOps

NO_COMPILER = {"PATH": "/nonexistent", "CC": "/nonexistent/cc"}
SECONDS = 300


def doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "helexa.neuron", "doctor"]
    environ = os.environ | {"NEURON_PORT": str(free_port())} | environment
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=SECONDS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_sound_machine_is_said_to_be_one(tmp_path: Path) -> None:
    run = doctor(**NO_COMPILER, HELEXA_CACHE=str(tmp_path / "cache"))
    assert (run.returncode, run.stderr) == (0, "")
    assert f"model files are kept in {tmp_path / 'cache'}" in run.stdout
    assert f"compiled kernels and packed weights are kept in {tmp_path / 'cache'}" in run.stdout
    assert "models run on" in run.stdout
    assert "is free to listen on" in run.stdout


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    run = doctor(**NO_COMPILER, HELEXA_CACHE=str(tmp_path))
    kernels = CpuOps.name if CpuOps.available() else ReferenceOps.name
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("cpu: ")]
    assert line.startswith(f"cpu: {kernels} kernels in ")
    assert line.endswith(" MiB free: no C compiler found; install gcc or clang for faster answers")
    assert "C compiler:" not in run.stdout
    assert run.returncode == 0


def test_what_engines_would_do_here_is_what_it_says() -> None:
    """The kernels are those in the cache of this user, whose tests have compiled them, or will."""
    run = doctor(NEURON_HARNESS__TORCH__THREADS="1")
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("cpu: ")]
    if line.startswith("cpu: native "):
        assert " on 1 threads, " in line
        assert line.endswith(": compiled for this machine")
        assert "C compiler: /" in run.stdout
    else:
        assert "compiler" in line or "kernels could not be built" in line


def test_a_setting_that_costs_speed_is_named(tmp_path: Path) -> None:
    run = doctor(**NO_COMPILER, HELEXA_CACHE=str(tmp_path), NEURON_HARNESS__TORCH__DTYPE="float32")
    assert run.returncode == 0
    assert "to make it faster: dtype is 'float32'" in run.stdout


@pytest.mark.parametrize("device", ["cuda:99", "mps"])
def test_a_device_that_is_not_there_is_a_fault(tmp_path: Path, device: str) -> None:
    if device == "mps" and sys.platform == "darwin":
        pytest.skip("it may be there")
    run = doctor(**NO_COMPILER, HELEXA_CACHE=str(tmp_path), NEURON_HARNESS__TORCH__DEVICE=device)
    assert run.returncode == 1
    assert f"device '{device}' cannot be used: " in run.stdout
    assert "Traceback" not in run.stdout + run.stderr


def test_a_torch_that_does_not_import_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libgomp.so.1: cannot open shared object file')")
    run = doctor(HELEXA_CACHE=str(tmp_path / "cache"), PYTHONPATH=str(tmp_path))
    assert run.returncode == 1
    assert "no engine can run: ImportError: libgomp.so.1: cannot open shared object file" in run.stdout
    assert "Traceback" not in run.stdout + run.stderr


def test_a_folder_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = doctor(**NO_COMPILER, HELEXA_CACHE=str(tmp_path / "file"))
    assert run.returncode == 1
    assert f"model files are to be kept in {tmp_path / 'file'}, which cannot be written" in run.stdout


def test_a_port_in_use_is_said_and_no_fault(tmp_path: Path) -> None:
    """It may be this node's own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        run = doctor(**NO_COMPILER, HELEXA_CACHE=str(tmp_path), NEURON_PORT=port, NEURON_HOST="127.0.0.1")
    assert run.returncode == 0
    assert f"port {port} is in use" in run.stdout
