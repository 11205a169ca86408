"""NVIDIA devices and their connections, as NVML reports them, without torch.

Devices have the same indexes as in torch. The environment variable `CUDA_VISIBLE_DEVICES` selects the visible devices
and their order.
"""

import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from helexa.core.logs import quoted

if TYPE_CHECKING:  # `node_reports` imports pydantic, which is slow; without a GPU, only servers need it
    from helexa.core.node_reports import Device, DeviceHealth

_P2P_READ = 0  # NVML_P2P_CAPS_INDEX_READ; pynvml's constant of this name is a tuple by mistake

ValueT = TypeVar("ValueT")

log = logging.getLogger(__name__)

HIDDEN = ("", "-1", "NoDevFiles")  # values of `CUDA_VISIBLE_DEVICES` that hide all devices

_TIMEOUT_SECONDS = 20.0
_DRIVER = Path("/dev/nvidiactl")
_LIBRARY = "libnvidia-ml.so.1"  # the library that `pynvml` loads


@dataclass(frozen=True)
class DeviceLink:
    """The connection of two devices; properties are None if NVML does not report them."""

    # indices of the devices, in torch's order
    first: int
    second: int
    path: str | None = None  # what the PCIe path between the devices crosses, as text
    # number of active NVLinks of the device with fewer NVLinks; 0 if NVLink does not connect the two devices
    nvlinks: int | None = None
    peer_access: bool | None = None  # whether the devices can read each other's memory directly


def links_between(nvml: Any, handles: Mapping[int, Any]) -> list[DeviceLink]:
    """Return the connections between all pairs of devices."""
    active = {index: _active_links(nvml, handle) for index, handle in handles.items()}
    return [_link(nvml, handles, active, first, second) for first, second in combinations(handles, 2)]


def _link(nvml: Any, handles: Mapping[int, Any], active: Mapping[int, int], first: int, second: int) -> DeviceLink:
    pair = handles[first], handles[second]
    level = _value(nvml, lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(*pair))
    status = _value(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(*pair, nvml.NVML_P2P_CAPS_INDEX_NVLINK))
    access = _value(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(*pair, _P2P_READ))
    nvlinks = min(active[first], active[second])
    return DeviceLink(
        first,
        second,
        path=_paths(nvml).get(level),
        nvlinks=None if status is None else nvlinks if status == nvml.NVML_P2P_STATUS_OK else 0,
        peer_access=None if access is None else access == nvml.NVML_P2P_STATUS_OK,
    )


def _paths(nvml: Any) -> dict[int | None, str]:
    return {
        nvml.NVML_TOPOLOGY_INTERNAL: "one board",
        nvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
        nvml.NVML_TOPOLOGY_MULTIPLE: "several PCIe switches",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "one PCIe host bridge",
        nvml.NVML_TOPOLOGY_NODE: "several PCIe host bridges of one NUMA node",
        nvml.NVML_TOPOLOGY_SYSTEM: "the connection between NUMA nodes",
    }


def _active_links(nvml: Any, handle: Any) -> int:
    """Return the number of active NVLinks of a device."""

    def state(link: int) -> int | None:
        return _value(nvml, lambda: nvml.nvmlDeviceGetNvLinkState(handle, link))

    return sum(state(link) == nvml.NVML_FEATURE_ENABLED for link in range(nvml.NVML_NVLINK_MAX_LINKS))


def _value(nvml: Any, read: Callable[[], ValueT]) -> ValueT | None:
    try:
        return read()
    except nvml.NVMLError:  # the driver or the device does not report this value
        return None


@dataclass(frozen=True)
class Accelerators:
    """The NVIDIA devices of this machine, found once per process."""

    devices: "list[Device]" = field(default_factory=list)
    cuda_version: str | None = None  # highest CUDA version that the driver supports; None if unknown
    driver_version: str | None = None
    # why no device is usable although a driver is installed; None if there is no such problem
    unavailable: str | None = None


@cache
def accelerators() -> Accelerators:
    """Return the NVIDIA devices that engines can use, or why no device is usable.

    The result has neither if no driver is loaded, `nvidia-ml-py` is missing, or `CUDA_VISIBLE_DEVICES` hides all
    devices.
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
        log.warning("accelerators not listed error=%s; nvidia-smi shows their state", quoted(error))
        return Accelerators(unavailable=str(error))
    devices: list[Device] = []
    lost = None
    for index, nvml_index in enumerate(nvml_indexes):
        try:
            devices.append(_device(nvml, index, nvml_index))
        except nvml.NVMLError as error:
            log.warning("device ignored device=cuda:%d error=%s; nvidia-smi shows its state", index, quoted(error))
            lost = str(error)
    return Accelerators(devices, f"{cuda // 1000}.{cuda % 1000 // 10}", driver, None if devices else lost)


def device_health() -> "list[DeviceHealth]":
    """Return memory use, utilization and temperature of visible devices that respond.

    The call may block if the driver is busy.
    """
    nvml, _ = _nvml()
    if nvml is None:
        return []
    try:
        nvml_indexes = _visible_indexes(nvml)
    except nvml.NVMLError as error:
        log.warning("accelerators not read error=%s; nvidia-smi shows their state", quoted(error))
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
        log.warning("accelerators not listed error=%s; nvidia-smi shows their state", quoted(error))
    return links_between(nvml, handles)


def has_nvidia_driver() -> bool:
    """Return whether NVIDIA's driver is loaded."""
    return _DRIVER.exists()


def visible(wanted: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the NVML indexes of the visible devices, in CUDA's order.

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
    """Return the module `pynvml` and None, or None and why the driver does not work.

    Both are None if no driver is loaded or the package `nvidia-ml-py` is not installed.
    """
    if sys.platform == "linux":  # `pynvml` is slow to import, and useless without NVIDIA's library
        try:
            ctypes.CDLL(_LIBRARY)
        except OSError:
            return None, None
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
    """Return the NVML indexes of the usable devices, in torch's order."""
    uuids = [_uuid(nvml, nvml_index) for nvml_index in range(nvml.nvmlDeviceGetCount())]
    return visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)


def _uuid(nvml: Any, nvml_index: int) -> str:
    """Return the UUID of a device; empty if the driver has lost the device."""
    try:
        return nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(nvml_index))
    except nvml.NVMLError:
        return ""


def _device(nvml: Any, index: int, nvml_index: int) -> "Device":
    from helexa.core.node_reports import Device

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


def _reading(nvml: Any, index: int, nvml_index: int) -> "DeviceHealth | None":
    from helexa.core.node_reports import DeviceHealth

    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(nvml_index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        log.warning("device not read device=cuda:%d error=%s; nvidia-smi shows its state", index, quoted(error))
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
    """Return the versions of NVIDIA's kernel module and NVML, for messages."""
    try:
        module = Path("/sys/module/nvidia/version").read_text().strip()
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return "versions unknown"
    _, _, library = maps.partition("libnvidia-ml.so.")
    return f"kernel module {module}, library {library.partition(chr(10))[0] or 'unknown'}"
