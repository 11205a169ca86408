"""Checks of the compiler and headers that Triton needs, and of device access."""

import sysconfig
from pathlib import Path

import pytest
import torch

from helexa.neuron import doctor_machine, kernel_survey_process
from helexa.neuron.config import TorchConfig
from helexa.neuron.doctor_machine import look_at_kernels
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.hardware.triton_toolchain import triton_missing
from helexa.neuron.kernel_survey import DeviceKernels, KernelSurvey


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a machine with all requirements and an empty kernel cache."""
    (tmp_path / "Python.h").touch()
    compiler = tmp_path / "gcc"
    compiler.touch(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}


def test_complete_toolchain_for_triton_has_no_missing_requirement(machine: dict[str, str]) -> None:
    assert triton_missing(machine) is None
    assert triton_missing(machine | {"CC": "gcc"}) is None


def test_missing_compiler_or_python_headers_for_triton_are_reported(machine: dict[str, str], tmp_path: Path) -> None:
    assert triton_missing(machine | {"CC": "icc"}) == "Triton finds no C compiler: install gcc or clang, or set CC"
    (tmp_path / "Python.h").unlink()
    assert "no Python.h: install the headers of Python 3" in (triton_missing(machine) or "")
    (tmp_path / "gcc").unlink()
    assert "no C compiler" in (triton_missing(machine) or "")


def test_cached_build_of_triton_needs_neither_compiler_nor_headers(machine: dict[str, str], tmp_path: Path) -> None:
    built = tmp_path / "cache" / "A1B2"
    built.mkdir(parents=True)
    (built / "cuda_utils.cpython-310-x86_64-linux-gnu.so").touch()
    assert triton_missing(machine | {"CC": "icc"}) is not None, "the cached build belongs to another Python"
    (built / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}").touch()
    assert triton_missing(machine | {"CC": "icc"}) is None


@pytest.mark.parametrize(
    ("without_access", "text"),
    [
        ([], "direct memory access between cuda:0, cuda:1"),
        ([("cuda:0", "cuda:1")], "no direct memory access, data is copied through main memory: cuda:0 and cuda:1"),
    ],
)
def test_doctor_reports_whether_gpus_can_access_each_others_memory(
    without_access: list[tuple[str, str]], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [
        DeviceKernels(device=name, kernels="triton", dtype="bfloat16", reason="") for name in ("cuda:0", "cuda:1")
    ]
    monkeypatch.setattr(
        doctor_machine,
        "survey_kernels",
        lambda *_: KernelSurvey(threads=1, devices=devices, without_access=without_access),
    )
    assert text in [result.text for result in look_at_kernels(TorchConfig(), "cuda:0")]


def test_doctor_lists_a_device_that_cannot_be_used_beside_the_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may use all memory of the device."""

    def full(device: torch.device) -> tuple[int, int]:
        raise torch.AcceleratorError("CUDA error: out of memory\nCompile with ..")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", full)
    survey = kernel_survey_process.take(EngineOptions(threads=torch.get_num_threads()))
    assert [device.device for device in survey.devices] == ["cpu", "cuda:0", "cuda:1"]
    assert [device.reason for device in survey.devices[1:]] == [
        "the device cannot be used: CUDA error: out of memory"
    ] * 2
    assert (survey.without_access, survey.unusable) == ([], None)
