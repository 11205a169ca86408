"""NVIDIA devices from NVML: numbering, error messages, missing sensors."""

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from helexa.neuron.app import create_app
from helexa.neuron.config import read_config
from helexa.neuron.doctor_machine import look_at_machine
from helexa.neuron.hardware import device_choice, machine_description, nvidia_gpus
from helexa.neuron.hardware.device_choice import device_for
from helexa.neuron.hardware.nvidia_gpus import device_health, visible

UUIDS = ["GPU-aa1", "GPU-ab2", "GPU-b3", "GPU-c4"]


@pytest.mark.parametrize(
    ("wanted", "indexes"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", [2]),
        ("3, 0", [3, 0]),
        ("1,9,0", [1]),
        ("1,1", [1]),
        ("GPU-b3,0", [2, 0]),
        ("GPU-a", []),  # two UUIDs have this prefix
        ("MIG-GPU-aa1/1/0", []),
    ],
)
def test_cuda_visible_devices_is_interpreted_like_in_the_cuda_runtime(wanted: str | None, indexes: list[int]) -> None:
    assert visible(wanted, UUIDS) == indexes


class NvmlError(Exception):
    value = 0


class FakeNvml(types.SimpleNamespace):
    """NVML on a machine with two devices, the second without sensors.

    Attributes:
        lost: indexes of devices that do not respond.
        mute: index of the device that does not report its memory.
    """

    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU = 0
    NVML_ERROR_LIBRARY_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIB_RM_VERSION_MISMATCH = 12, 9, 18

    def __init__(self, init_error: int | None = None, lost: tuple[int, ...] = (), mute: int = -1) -> None:
        super().__init__(lost=lost, mute=mute)
        self._init_error = init_error

    def nvmlInit(self) -> None:
        if self._init_error is not None:
            error = NvmlError("Driver/library version mismatch")
            error.value = self._init_error
            raise error

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise NvmlError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"card {handle}"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return 9, handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if handle == self.mute:
            raise NvmlError("Not Supported")
        return types.SimpleNamespace(total=8 << 30, used=(1 + handle) << 30, free=(7 - handle) << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 1:
            raise NvmlError("Not Supported")
        return types.SimpleNamespace(gpu=40)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        if handle == 1:
            raise NvmlError("Not Supported")
        return 55

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13010

    def nvmlSystemGetDriverVersion(self) -> str:
        return "595.58"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvidia_gpus, "_LIBRARY", None)  # a library that exists
    nvidia_gpus._nvml.cache_clear()
    nvidia_gpus.accelerators.cache_clear()
    machine_description.discover.cache_clear()
    yield
    nvidia_gpus._nvml.cache_clear()
    nvidia_gpus.accelerators.cache_clear()
    machine_description.discover.cache_clear()


def test_nvidia_devices_are_listed_with_memory_utilization_and_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    listed = nvidia_gpus.accelerators()
    assert (listed.cuda_version, listed.driver_version, listed.unavailable) == ("13.1", "595.58", None)
    assert [
        (device.index, device.name, device.vram_total_mb, device.compute_capability) for device in listed.devices
    ] == [
        (0, "card 0", 8192, "9.0"),
        (1, "card 1", 8192, "9.1"),
    ]
    first, second = device_health()
    assert (first.vram_free_mb, first.utilization_pct, first.temp_c) == (7168, 40, 55)
    assert (second.vram_free_mb, second.utilization_pct, second.temp_c) == (6144, 0, 0)


def test_links_are_listed_only_for_visible_devices_that_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(nvidia_gpus, "links_between", lambda nvml, handles: handles)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert nvidia_gpus.device_links() == {0: 1, 1: 0}
    nvml.lost = (1,)
    assert nvidia_gpus.device_links() == {1: 0}


def test_devices_hidden_by_cuda_visible_devices_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [(device.index, device.name) for device in nvidia_gpus.accelerators().devices] == [(0, "card 1")]
    assert [(device.index, device.vram_used_mb) for device in device_health()] == [(0, 2048)]


def test_broken_driver_is_ignored_if_all_devices_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=18))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert nvidia_gpus.accelerators() == nvidia_gpus.Accelerators()
    assert device_choice.default_device() == "cpu"


def test_gpu_that_does_not_respond_does_not_hide_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(lost=(0,)))
    listed = nvidia_gpus.accelerators()
    assert ([device.index for device in listed.devices], listed.unavailable) == ([1], None)
    assert [device.index for device in device_health()] == [1]


def test_reason_why_no_gpu_is_available_is_reported_if_all_gpus_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(lost=(0, 1)))
    listed = nvidia_gpus.accelerators()
    assert (listed.devices, listed.unavailable) == ([], "GPU is lost")


def test_device_whose_memory_cannot_be_read_is_listed_with_0_mb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(mute=0))
    assert [device.vram_total_mb for device in nvidia_gpus.accelerators().devices] == [0, 8192]


def test_gpu_with_unreadable_memory_counts_with_the_free_memory_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(mute=0))
    monkeypatch.setattr(machine_description, "torch_version", lambda: "2.13.0")
    monkeypatch.setattr(device_choice, "host_memory", lambda: (96 << 30, 128 << 30))
    assert str(device_for(64 << 30)) == "cuda:0: 96.0 GB free, the most"
    monkeypatch.setattr(device_choice, "host_memory", lambda: (1 << 30, 128 << 30))
    assert device_for(4 << 30).device == "cuda:1"


@pytest.mark.parametrize(
    ("nvml", "torch", "device"),
    [
        (FakeNvml(), "2.9.0+cu130", "cuda:0"),
        (FakeNvml(lost=(0,)), "2.9.0+cu130", "cuda:1"),
        (FakeNvml(mute=0), "2.9.0+cu130", "cuda:1"),  # the device with the most reported memory
        (FakeNvml(lost=(0, 1)), "2.9.0+cu130", "cuda:0"),
        (FakeNvml(init_error=18), "2.9.0", "cuda:0"),
        (FakeNvml(init_error=18), "2.9.0+cpu", "cpu"),
        (FakeNvml(init_error=9), "2.9.0", "cpu"),
        (FakeNvml(), "", "cpu"),
    ],
)
def test_default_device_remains_a_gpu_if_the_nvidia_driver_is_broken(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, torch: str, device: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(machine_description, "torch_version", lambda: torch)
    assert device_choice.default_device() == device


def test_driver_updated_while_in_use_is_reported_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=18))
    listed = nvidia_gpus.accelerators()
    assert listed.devices == []
    assert listed.unavailable is not None
    assert listed.unavailable.startswith(
        "Driver/library version mismatch: the driver was updated while it was in use ("
    )
    assert listed.unavailable.endswith("; reboot")


@pytest.mark.parametrize(
    ("device", "torch", "errors"),
    [("auto", "2.9.0", 1), ("cuda:1", "2.9.0", 1), ("auto", "2.9.0+cpu", 0), ("cpu", "2.9.0", 0)],
)
def test_node_with_a_driver_mismatch_logs_one_error_when_it_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str, torch: str, errors: int
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=18))
    monkeypatch.setattr(machine_description, "torch_version", lambda: torch)
    create_app(read_config(None, {"NEURON_HARNESS__TORCH__DEVICE": device}))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == errors
    chosen = "cuda:0" if device == "auto" else device
    for line in lines:
        assert line.startswith(
            f"no model can be loaded device={chosen} error='the NVIDIA driver does not work: "
            "Driver/library version mismatch: the driver was updated"
        )
        assert line.endswith("; reboot'")


def test_driver_that_does_not_respond_is_reported_as_unavailable_after_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    nvml = FakeNvml()
    nvml.nvmlInit = lambda: answers.wait(60)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(nvidia_gpus, "_TIMEOUT_SECONDS", 0.05)
    listed = nvidia_gpus.accelerators()
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "nvml":
            thread.join()  # otherwise the next test may see its result
    assert listed.devices == []
    assert listed.unavailable == "the driver did not respond for 0.05 s; run nvidia-smi, or reboot"


@pytest.mark.parametrize("code", [9, 12])
def test_missing_nvidia_driver_is_not_reported_as_a_problem(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(init_error=code))
    assert nvidia_gpus.accelerators() == nvidia_gpus.Accelerators()
    assert device_health() == []


@pytest.mark.parametrize(
    ("nvml", "visible_devices", "reported"),
    [
        (FakeNvml(init_error=12), None, True),  # a container without the library
        (FakeNvml(), "MIG-b3", True),
        (FakeNvml(), None, False),
        (FakeNvml(), "", False),
        (FakeNvml(init_error=18), None, False),  # has its own message
    ],
)
def test_installed_driver_without_the_nvml_library_is_reported_as_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvml: FakeNvml, visible_devices: str | None, reported: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(nvidia_gpus, "_DRIVER", tmp_path)
    monkeypatch.setattr(machine_description, "torch_version", lambda: "2.13.0")
    if visible_devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
    assert (machine_description.overlooked() is not None) == reported
    levels = [finding.level for finding in look_at_machine("auto") if "set device" in finding.text]
    assert levels == ["note"] * reported
    monkeypatch.setattr(nvidia_gpus, "_DRIVER", tmp_path / "nowhere")
    assert machine_description.overlooked() is None
