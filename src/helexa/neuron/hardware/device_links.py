"""The connections between NVIDIA devices, as NVML (NVIDIA's management library) reports them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeVar

_P2P_READ = 0  # pynvml's constant NVML_P2P_CAPS_INDEX_READ is a tuple by mistake

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class DeviceLink:
    """The connection between two devices. None means that NVML does not report a property.

    Attributes:
        first, second: indices of the devices, in torch's order.
        path: what the PCIe path between the devices crosses, as text.
        nvlinks: number of active NVLinks of each device, if NVLink connects the two devices; 0 if it does not.
        peer_access: whether the devices can read each other's memory directly.
    """

    first: int
    second: int
    path: str | None = None
    nvlinks: int | None = None
    peer_access: bool | None = None


def links_between(nvml: Any, handles: Mapping[int, Any]) -> list[DeviceLink]:
    """Return the connections between all pairs of devices.

    Args:
        nvml: the initialized module `pynvml`.
        handles: NVML's handles of the devices, by their index in torch's order.
    """
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
    """Return the number of active NVLinks of a device. Links that the device does not have are not active."""

    def state(link: int) -> int | None:
        return _value(nvml, lambda: nvml.nvmlDeviceGetNvLinkState(handle, link))

    return sum(state(link) == nvml.NVML_FEATURE_ENABLED for link in range(nvml.NVML_NVLINK_MAX_LINKS))


def _value(nvml: Any, read: Callable[[], ValueT]) -> ValueT | None:
    try:
        return read()
    except nvml.NVMLError:  # the driver or the device does not report this value
        return None
