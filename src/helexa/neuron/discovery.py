"""What this machine is: its system, its CPU and its accelerators, found without torch and without failing."""

import logging
import os
import platform
import socket
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from helexa.core.fleet import Device, DeviceHealth, Discovery

log = logging.getLogger(__name__)


@cache
def discover() -> Discovery:
    """The facts that do not change while the process lives. `max_prompt_tokens` is left to the caller."""
    nvml, reason = _nvml()
    devices, cuda, driver = ([], None, None) if nvml is None else _cuda_facts(nvml)
    return Discovery(
        hostname=socket.gethostname(),
        os=platform.system(),
        kernel=platform.release(),
        cpu=_cpu_name(),
        cpu_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        memory_total_mb=psutil.virtual_memory().total >> 20,
        cuda_version=cuda,
        driver_version=driver,
        cuda_unavailable_reason=reason,
        devices=devices,
    )


def device_health() -> list[DeviceHealth]:
    """Live readings of every accelerator; empty when there is none or it does not answer."""
    nvml, _ = _nvml()
    if nvml is None:
        return []
    try:
        return [_reading(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        log.warning("the accelerators could not be read: %s", error)
        return []


def default_device() -> str:
    """Where a model runs when nothing else is said: the first CUDA device that torch can use, else the CPU."""
    return "cuda:0" if discover().devices and not torch_version().endswith("+cpu") else "cpu"


@cache
def torch_version() -> str:
    """The installed torch, which is not imported; empty when there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


@cache
def _nvml() -> tuple[Any, str | None]:
    """The NVML library, ready for use, or None with the reason if a driver is there but does not work."""
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        match getattr(error, "value", None):
            case pynvml.NVML_ERROR_LIBRARY_NOT_FOUND | pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
                return None, None
            case pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
                return None, f"{error}: the driver was updated while it was in use ({_driver_module()}); reboot"
            case _:
                return None, str(error)
    return pynvml, None


def _cuda_facts(nvml: Any) -> tuple[list[Device], str | None, str | None]:
    try:
        devices = [_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return devices, f"{cuda // 1000}.{cuda % 1000 // 10}", nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError as error:
        log.warning("the accelerators could not be listed: %s", error)
        return [], None, None


def _device(nvml: Any, index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        vram_total_mb=nvml.nvmlDeviceGetMemoryInfo(handle).total >> 20,
        compute_capability=f"{major}.{minor}",
    )


def _reading(nvml: Any, index: int) -> DeviceHealth:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return DeviceHealth(
        index=index,
        vram_used_mb=memory.used >> 20,
        vram_free_mb=memory.free >> 20,
        utilization_pct=nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        temp_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    )


def _driver_module() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return "its version is unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
