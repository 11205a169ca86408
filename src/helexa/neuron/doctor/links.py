"""Check the connections between devices and between NUMA nodes, and how many ranks make sense on this machine."""

from collections.abc import Iterator, Sequence

from helexa.core.fleet import Discovery, alike
from helexa.neuron.doctor.check_result import CheckResult
from helexa.neuron.hardware.accelerators import device_links
from helexa.neuron.hardware.device_links import DeviceLink
from helexa.neuron.hardware.discovery import discover
from helexa.neuron.hardware.numa import CpuNode, numa_nodes
from helexa.neuron.lifecycle.rank_check import max_tensor_parallel

_OWN_DISTANCE = 10  # Linux's distance of a NUMA node to its own memory


def look_at_links(device: str, tensor_parallel: int) -> Iterator[CheckResult]:
    """Check the connections between devices and between NUMA nodes, and the number of ranks.

    Args:
        device: torch name of the device on which models run.
        tensor_parallel: configured default number of ranks.
    """
    facts, nodes = discover(), numa_nodes()
    yield from describe_devices(facts, device_links() if len(facts.devices) > 1 else [])
    yield from describe_numa_nodes(nodes)
    if device.startswith("cuda"):
        yield from describe_gpu_ranks(facts, max_tensor_parallel(device, tensor_parallel, facts))
    elif device == "cpu":
        yield describe_cpu_ranks(len(nodes), tensor_parallel)


def describe_devices(facts: Discovery, links: Sequence[DeviceLink]) -> Iterator[CheckResult]:
    """Yield which devices are alike, and one finding for each kind of connection between devices."""
    if len(facts.devices) > 1:
        groups = [f"{len(group)} x {group[0].name}" for group in alike(facts.devices)]
        yield CheckResult("links", "fine", f"devices that are alike: {', '.join(groups)}")
    pairs: dict[str, list[str]] = {}
    for link in links:
        pairs.setdefault(_connection(link), []).append(f"cuda:{link.first} and cuda:{link.second}")
    for connection, names in pairs.items():
        yield CheckResult("links", "fine", f"{connection}: {', '.join(names)}")


def describe_numa_nodes(nodes: Sequence[CpuNode]) -> Iterator[CheckResult]:
    """Yield the NUMA nodes with their CPUs, memory and distances, if there are several."""
    if len(nodes) < 2:
        return
    sizes = ", ".join(f"{node.number} ({len(node.cpus)} CPUs, {node.memory_mb} MiB)" for node in nodes)
    distances = [node.distances[other.number] for node in nodes for other in nodes if other.number in node.distances]
    farthest = max(distances, default=_OWN_DISTANCE) / _OWN_DISTANCE
    text = f"NUMA nodes: {sizes}"
    if farthest > 1:
        text += f"; access to the memory of another NUMA node takes up to {farthest:g} times as long"
    yield CheckResult("links", "fine", text)


def describe_cpu_ranks(nodes: int, tensor_parallel: int) -> CheckResult:
    """Return whether the configured number of ranks suits the number of NUMA nodes."""
    if nodes < 2 and tensor_parallel == 1:
        return CheckResult("links", "fine", "one NUMA node: one rank makes sense (tensor_parallel = 1)")
    if nodes < 2:
        text = f"tensor_parallel is {tensor_parallel}, but there is one NUMA node: 1 rank is usually faster"
        return CheckResult("links", "note", text)
    if tensor_parallel == nodes:
        return CheckResult("links", "fine", f"models run on {nodes} ranks, one per NUMA node")
    text = f"tensor_parallel is {tensor_parallel}; try {nodes}, which is one rank per NUMA node"
    return CheckResult("links", "note", text)


def describe_gpu_ranks(facts: Discovery, most: int) -> Iterator[CheckResult]:
    """Yield among how many devices a model can be divided, if there are several devices."""
    if len(facts.devices) < 2:
        return
    if most > 1:
        yield CheckResult(
            "links", "fine", f"a model can be divided among up to {most} devices (tensor_parallel = {most})"
        )
    else:
        yield CheckResult(
            "links", "fine", "each model runs on one device; models cannot be divided among these devices"
        )


def _connection(link: DeviceLink) -> str:
    """Return a description of the connection between two devices."""
    parts: list[str] = []
    if link.nvlinks:
        parts.append(f"NVLink ({link.nvlinks} links per device)")
    elif link.nvlinks == 0:
        parts.append("no NVLink")
    if link.path is not None:
        parts.append(f"PCIe through {link.path}")
    if link.peer_access is not None:
        parts.append("direct memory access" if link.peer_access else "no direct memory access")
    return ", ".join(parts) or "unknown connection"
