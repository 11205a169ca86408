"""NVIDIA devices as reported by NVML (NVIDIA's management library), without importing torch.

The devices have the same numbers as in torch: `CUDA_VISIBLE_DEVICES` of this process selects and orders them.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from helexa.core.fleet import Device, DeviceHealth
from helexa.neuron.hardware.device_links import DeviceLink, links_between

log = logging.getLogger(__name__)

HIDDEN = ("", "-1", "NoDevFiles")
"""Values of `CUDA_VISIBLE_DEVICES` that hide all devices."""

_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True)
class Accelerators:
    """The NVIDIA devices of this machine, found once per process.

    Attributes:
        devices: the devices that engines can use, in torch's order.
        cuda_version: highest CUDA version that the driver supports; None if unknown.
        driver_version: version of NVIDIA's driver; None if unknown.
        unavailable: why no device is usable although a driver is installed; None if there is no such problem.
    """

    devices: list[Device] = field(default_factory=list[Device])
    cuda_version: str | None = None
    driver_version: str | None = None
    unavailable: str | None = None


@cache
def accelerators() -> Accelerators:
    """Return the NVIDIA devices that engines can use. Errors are returned in `unavailable`, not raised.

    If the driver does not respond within `_TIMEOUT_SECONDS`, the result has no devices.
    """
    results: list[Accelerators] = []
    # A separate thread makes the calls, because a call into a driver that lost its device may never return.
    thread = threading.Thread(target=lambda: results.append(_find()), name="nvml", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_SECONDS)
    if not results:
        return Accelerators(
            unavailable=f"the driver did not respond for {_TIMEOUT_SECONDS:g} s; run nvidia-smi, or reboot"
        )
    return results[0]


def _find() -> Accelerators:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return Accelerators()  # devices are hidden on purpose, so a broken driver does not matter
    nvml, reason = _nvml()
    if nvml is None:
        return Accelerators(unavailable=reason)
    try:
        nvml_indexes = _visible_indexes(nvml)
        cuda, driver = nvml.nvmlSystemGetCudaDriverVersion_v2(), nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError as error:
        log.warning("the accelerators could not be listed: %s", error)
        return Accelerators(unavailable=str(error))
    devices: list[Device] = []
    lost = None
    for index, nvml_index in enumerate(nvml_indexes):
        try:
            devices.append(_device(nvml, index, nvml_index))
        except nvml.NVMLError as error:
            log.warning("cuda:%d is ignored: %s", index, error)
            lost = str(error)
    return Accelerators(devices, f"{cuda // 1000}.{cuda % 1000 // 10}", driver, None if devices else lost)


def device_health() -> list[DeviceHealth]:
    """Return the current memory use, utilization and temperature of each visible device that responds.

    The call may block if the driver is busy.
    """
    nvml, _ = _nvml()
    if nvml is None:
        return []
    try:
        nvml_indexes = _visible_indexes(nvml)
    except nvml.NVMLError as error:
        log.warning("the accelerators could not be read: %s", error)
        return []
    readings = (_reading(nvml, index, nvml_index) for index, nvml_index in enumerate(nvml_indexes))
    return [reading for reading in readings if reading is not None]


def device_links() -> list[DeviceLink]:
    """Return the connections between all pairs of visible devices that respond.

    The call may block if the driver is busy.
    """
    nvml, _ = _nvml()
    if nvml is None:
        return []
    handles: dict[int, Any] = {}
    try:
        for index, nvml_index in enumerate(_visible_indexes(nvml)):
            with suppress(nvml.NVMLError):  # the driver has lost the device
                handles[index] = nvml.nvmlDeviceGetHandleByIndex(nvml_index)
    except nvml.NVMLError as error:
        log.warning("the accelerators could not be listed: %s", error)
    return links_between(nvml, handles)


def visible(wanted: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the NVML indexes of the devices that CUDA shows to a process, in the order in which CUDA numbers them.

    Args:
        wanted: value of `CUDA_VISIBLE_DEVICES`, a list of numbers or UUID prefixes; None if the variable is not set.
            CUDA ignores the first invalid entry and all entries after it.
        uuids: UUIDs of all devices, by NVML index.
    """
    if wanted is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for name in (entry.strip() for entry in wanted.split(",")):
        matches = [nvml_index for nvml_index, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if name.isdecimal():
            matches = [int(name)] if int(name) < len(uuids) else []
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


@cache
def _nvml() -> tuple[Any, str | None]:
    """Return the initialized NVML module and None, or None and the reason why the installed driver does not work.

    Without a driver or without the package `nvidia-ml-py`, both elements are None.
    """
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


def _visible_indexes(nvml: Any) -> list[int]:
    """Return the NVML index of each device that engines can use, in the order in which torch numbers the devices."""
    uuids = [_uuid(nvml, nvml_index) for nvml_index in range(nvml.nvmlDeviceGetCount())]
    return visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)


def _uuid(nvml: Any, nvml_index: int) -> str:
    """Return the UUID of the device with the index `nvml_index`; empty if the driver has lost the device."""
    try:
        return nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(nvml_index))
    except nvml.NVMLError:
        return ""


def _device(nvml: Any, index: int, nvml_index: int) -> Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(nvml_index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    try:
        total = nvml.nvmlDeviceGetMemoryInfo(handle).total
    except nvml.NVMLError:  # some devices do not report memory
        total = 0
    return Device(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        vram_total_mb=total >> 20,
        compute_capability=f"{major}.{minor}",
    )


def _reading(nvml: Any, index: int, nvml_index: int) -> DeviceHealth | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(nvml_index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        log.warning("cuda:%d could not be read: %s", index, error)
        return None

    def read(value: Callable[[], int]) -> int:
        try:
            return value()
        except nvml.NVMLError:  # some devices lack some sensors
            return 0

    return DeviceHealth(
        index=index,
        vram_used_mb=memory.used >> 20,
        vram_free_mb=memory.free >> 20,
        utilization_pct=read(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        temp_c=read(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
    )


def _versions() -> str:
    """Return the versions of NVIDIA's kernel module and of the NVML library, as text for an error message.

    NVML works only if both versions are equal.
    """
    try:
        module = Path("/sys/module/nvidia/version").read_text().strip()
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return "versions unknown"
    _, _, library = maps.partition("libnvidia-ml.so.")
    return f"kernel module {module}, library {library.partition(chr(10))[0] or 'unknown'}"
