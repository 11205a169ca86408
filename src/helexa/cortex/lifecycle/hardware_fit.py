"""Whether a node's hardware can hold a model, and on which of its devices, independent of free memory."""

from dataclasses import dataclass

from helexa.core.catalogue import Profile
from helexa.core.fleet import Device, Discovery, alike
from helexa.cortex.lifecycle.memory_estimator import HOST


@dataclass(frozen=True)
class DevicePool:
    """Devices of a node from which the devices for a model are chosen.

    Attributes:
        devices: indices of the devices.
        count: number of devices to choose. This is the model's `min_devices`. In the pool of the device `HOST`, it is
            1, because all ranks of a model share the host's memory.
    """

    devices: tuple[int, ...]
    count: int


def device_pools(profile: Profile, discovery: Discovery) -> list[DevicePool]:
    """Return the pools of devices that can hold the model; empty if the node's hardware cannot hold it.

    If the model needs several devices, the devices of a pool are alike.
    """
    if misfit(profile, discovery) is not None:
        return []
    if not discovery.devices:
        return [DevicePool((HOST,), 1)]
    count = profile.min_devices
    groups = [group for group in _groups(profile, discovery) if len(group) >= count]
    return [DevicePool(tuple(device.index for device in group), count) for group in groups]


def misfit(profile: Profile, discovery: Discovery) -> str | None:
    """Return why the node's hardware cannot hold the model, as text for error messages; None if it can.

    Nodes that do not report `max_tensor_parallel` can divide a model only among accelerators, which may differ.
    """
    count, floor_mb = profile.min_devices, profile.min_device_vram_mb
    needs = f"needs {count} device{'s' if count > 1 else ''}" + (f" of {floor_mb} MB" if floor_mb else "")
    ranks = discovery.max_tensor_parallel
    if not discovery.devices:
        if floor_mb:
            return f"{needs}; the node has no accelerator"
        ranks = ranks or 1
    if ranks is not None and count > max(ranks, 1):
        return f"{needs}; the node can divide a model among {ranks}"
    if not discovery.devices:
        return None
    groups = _groups(profile, discovery)
    largest = max(map(len, groups), default=0)
    if largest >= count:
        return None
    return f"{needs}; the node has {largest or 'none'}" + (" that are alike" if len(groups) > 1 else "")


def _groups(profile: Profile, discovery: Discovery) -> list[list[Device]]:
    """Return the groups of devices of which each has enough memory in total for the model."""
    floor_mb = profile.min_device_vram_mb or 0
    capable = [device for device in discovery.devices if device.vram_total_mb >= floor_mb]
    needs_alike = profile.min_devices > 1 and discovery.max_tensor_parallel is not None
    return alike(capable) if needs_alike else [capable]
