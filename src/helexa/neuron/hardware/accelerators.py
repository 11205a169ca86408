"""NVIDIA's accelerators, as NVML tells of them, numbered as torch numbers them in engines that this process starts."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from helexa.core.fleet import Device, DeviceHealth

log = logging.getLogger(__name__)

HIDDEN = ("", "-1", "NoDevFiles")
"""What `CUDA_VISIBLE_DEVICES` is where no device is to be seen."""

_PATIENCE_SECONDS = 20.0


@dataclass(frozen=True)
class Accelerators:
    """What is there, which does not change while the process lives.

    Attributes:
        unavailable: why there is none although there is a driver.
    """

    devices: list[Device] = field(default_factory=list[Device])
    cuda_version: str | None = None
    driver_version: str | None = None
    unavailable: str | None = None


@cache
def accelerators() -> Accelerators:
    """Those that engines can see; never fails, nor waits long for a driver that does not answer."""
    found: list[Accelerators] = []
    # A thread of its own: a driver that lost its device may never come back from a call.
    thread = threading.Thread(target=lambda: found.append(_find()), name="nvml", daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    if not found:
        return Accelerators(
            unavailable=f"the driver did not answer for {_PATIENCE_SECONDS:g} s; see nvidia-smi, reboot"
        )
    return found[0]


def _find() -> Accelerators:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return Accelerators()  # not even a driver that does not work is missed
    nvml, reason = _nvml()
    if nvml is None:
        return Accelerators(unavailable=reason)
    try:
        places = _places(nvml)
        cuda, driver = nvml.nvmlSystemGetCudaDriverVersion_v2(), nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError as error:
        log.warning("the accelerators could not be listed: %s", error)
        return Accelerators(unavailable=str(error))
    found: list[Device] = []
    lost = None
    for index, place in enumerate(places):
        try:
            found.append(_device(nvml, index, place))
        except nvml.NVMLError as error:
            log.warning("cuda:%d is left out: %s", index, error)
            lost = str(error)
    return Accelerators(found, f"{cuda // 1000}.{cuda % 1000 // 10}", driver, None if found else lost)


def device_health() -> list[DeviceHealth]:
    """Live readings of those that answer. May take long: drivers are locked while they are busy."""
    nvml, _ = _nvml()
    if nvml is None:
        return []
    try:
        places = _places(nvml)
    except nvml.NVMLError as error:
        log.warning("the accelerators could not be read: %s", error)
        return []
    readings = (_reading(nvml, index, place) for index, place in enumerate(places))
    return [reading for reading in readings if reading is not None]


def visible(wanted: str | None, uuids: Sequence[str]) -> list[int]:
    """Which of all devices CUDA shows, in its order.

    Args:
        wanted: `CUDA_VISIBLE_DEVICES`, numbers or beginnings of UUIDs; CUDA stops at the first that names none.
        uuids: of all devices, in the order of the bus.
    """
    if wanted is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for name in (part.strip() for part in wanted.split(",")):
        named = [place for place, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if name.isdecimal():
            named = [int(name)] if int(name) < len(uuids) else []
        if len(named) != 1 or named[0] in chosen:
            break
        chosen += named
    return chosen


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
                return None, f"{error}: the driver was updated while it was in use ({_versions()}); reboot"
            case _:
                return None, str(error)
    return pynvml, None


def _places(nvml: Any) -> list[int]:
    """NVML's index of each device that engines can see, in their order."""
    uuids = [_uuid(nvml, place) for place in range(nvml.nvmlDeviceGetCount())]
    return visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)


def _uuid(nvml: Any, place: int) -> str:
    """Empty for a device that is lost, which keeps its number all the same."""
    try:
        return nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(place))
    except nvml.NVMLError:
        return ""


def _device(nvml: Any, index: int, place: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(place)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    try:
        total = nvml.nvmlDeviceGetMemoryInfo(handle).total
    except nvml.NVMLError:  # not every device says
        total = 0
    return Device(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        vram_total_mb=total >> 20,
        compute_capability=f"{major}.{minor}",
    )


def _reading(nvml: Any, index: int, place: int) -> DeviceHealth | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(place)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        log.warning("cuda:%d could not be read: %s", index, error)
        return None

    def read(value: Callable[[], int]) -> int:
        try:
            return value()
        except nvml.NVMLError:  # not every device has every sensor
            return 0

    return DeviceHealth(
        index=index,
        vram_used_mb=memory.used >> 20,
        vram_free_mb=memory.free >> 20,
        utilization_pct=read(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        temp_c=read(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    )


def _versions() -> str:
    """Of the kernel's module and of the library, which must be the same."""
    try:
        module = Path("/sys/module/nvidia/version").read_text().strip()
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return "their versions are unknown"
    _, _, library = maps.partition("libnvidia-ml.so.")
    return f"its module is {module}, its library {library.partition(chr(10))[0] or 'unknown'}"
