"""Where a catalogued model fits: pure functions over profiles and nodes."""

from collections.abc import Iterable

from helexa.core.catalogue import Profile
from helexa.core.fleet import Discovery, ModelSpec
from helexa.cortex.fleet import Node


def allowed(profile: Profile, node: Node) -> bool:
    """Whether the operator lets the model run there."""
    return not profile.pinned_on or node.name in profile.pinned_on


def fits(profile: Profile, discovery: Discovery) -> bool:
    """Whether the hardware could ever hold the model. A node without accelerators holds what states no floor."""
    if not discovery.devices:
        return profile.min_devices == 1 and not profile.min_device_vram_mb
    return len(_capable_devices(profile, discovery)) >= profile.min_devices


def feasible(profile: Profile, node: Node) -> bool:
    """Whether the model may and can run on a node whose hardware is known."""
    return allowed(profile, node) and node.discovery is not None and fits(profile, node.discovery)


def best(profile: Profile, nodes: Iterable[Node]) -> Node | None:
    """The node to load the model on: one with room first, then the one with most free memory, then by name."""

    def rank(node: Node) -> tuple[bool, int, str]:
        free = _free_vram_mb(node, profile.min_devices)
        room = free
        if node.discovery is not None and not node.discovery.devices:
            room = node.discovery.memory_total_mb
        return room < (profile.vram_mb or 0), -free, node.name

    return min((node for node in nodes if feasible(profile, node)), key=rank, default=None)


def load_spec(profile: Profile, discovery: Discovery) -> ModelSpec:
    """What to ask of a node with this hardware."""
    devices = _capable_devices(profile, discovery)[: profile.min_devices]
    return ModelSpec(
        model_id=profile.id,
        harness=profile.harness,
        source=profile.full_source(),
        quant=profile.quant,
        tensor_parallel=profile.min_devices if profile.min_devices > 1 else None,
        devices=devices or None,
    )


def _capable_devices(profile: Profile, discovery: Discovery) -> list[int]:
    floor = profile.min_device_vram_mb or 0
    return [device.index for device in discovery.devices if device.vram_total_mb >= floor]


def _free_vram_mb(node: Node, devices: int) -> int:
    if node.health is not None and node.health.devices:
        free = [device.vram_free_mb for device in node.health.devices]
    else:
        free = [device.vram_total_mb for device in node.discovery.devices] if node.discovery else []
    return sum(sorted(free, reverse=True)[:devices])
