"""What `neuron doctor` says about the connections between devices and NUMA nodes, from scripted facts."""

from types import SimpleNamespace

import pynvml
import pytest

from helexa.core.node_reports import Discovery
from helexa.neuron.doctor_machine import describe_cpu_ranks, describe_devices, describe_gpu_ranks, describe_numa_nodes
from helexa.neuron.hardware.cpus import CpuNode
from helexa.neuron.hardware.nvidia_gpus import DeviceLink, links_between


class NvmlError(Exception):
    """An error of the fake NVML."""


class FakeNvml(SimpleNamespace):
    """NVML on a machine with four devices: 0 and 1 are connected by four NVLinks, 2 and 3 by a PCIe switch.

    Devices 0 and 1 are on another NUMA node than 2 and 3, and have no direct memory access to 2 and 3.

    Attributes:
        old: whether the driver reports nothing about connections.
    """

    NVMLError = NvmlError
    old = False

    def __getattr__(self, name: str) -> int:
        if not name.startswith("NVML_"):
            raise AttributeError(name)
        return getattr(pynvml, name)

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if self.old or handle in "CD" or link >= 6:
            raise NvmlError("Not Supported")
        return int(link < 4)

    def nvmlDeviceGetTopologyCommonAncestor(self, first: str, second: str) -> int:
        if self.old:
            raise NvmlError("Not Supported")
        pairs = {"AB": pynvml.NVML_TOPOLOGY_HOSTBRIDGE, "CD": pynvml.NVML_TOPOLOGY_SINGLE}
        return pairs.get(first + second, pynvml.NVML_TOPOLOGY_SYSTEM)

    def nvmlDeviceGetP2PStatus(self, first: str, second: str, index: int) -> int:
        if self.old:
            raise NvmlError("Not Supported")
        connected = {pynvml.NVML_P2P_CAPS_INDEX_NVLINK: ("AB",), 0: ("AB", "CD")}[index]
        return pynvml.NVML_P2P_STATUS_OK if first + second in connected else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED


HANDLES = dict(enumerate("ABCD"))


def facts(*names: str) -> Discovery:
    devices = [{"index": index, "name": name, "vram_total_mb": 24000} for index, name in enumerate(names)]
    return Discovery.model_validate({"hostname": "n", "os": "Linux", "devices": devices})


def test_links_between_gpus_are_read_from_nvml() -> None:
    links = {(link.first, link.second): link for link in links_between(FakeNvml(), HANDLES)}
    assert len(links) == 6
    assert links[0, 1] == DeviceLink(0, 1, "one PCIe host bridge", nvlinks=4, peer_access=True)
    assert links[2, 3] == DeviceLink(2, 3, "one PCIe switch", nvlinks=0, peer_access=True)
    assert links[1, 2] == DeviceLink(1, 2, "the connection between NUMA nodes", nvlinks=0, peer_access=False)


def test_gpu_link_properties_that_the_driver_does_not_report_are_omitted() -> None:
    assert links_between(FakeNvml(old=True), {0: "A", 1: "B"}) == [DeviceLink(0, 1)]
    assert links_between(FakeNvml(), {0: "A"}) == []


def test_doctor_lists_gpu_pairs_with_the_same_connection_together() -> None:
    links = links_between(FakeNvml(), HANDLES)
    texts = [finding.text for finding in describe_devices(facts("L4", "L4", "A2", "A2"), links)]
    assert texts == [
        "devices that are alike: 2 x L4, 2 x A2",
        "NVLink (4 links per device), PCIe through one PCIe host bridge, direct memory access: cuda:0 and cuda:1",
        "no NVLink, PCIe through the connection between NUMA nodes, no direct memory access: "
        "cuda:0 and cuda:2, cuda:0 and cuda:3, cuda:1 and cuda:2, cuda:1 and cuda:3",
        "no NVLink, PCIe through one PCIe switch, direct memory access: cuda:2 and cuda:3",
    ]
    assert [finding.text for finding in describe_devices(facts("L4", "L4"), [DeviceLink(0, 1)])] == [
        "devices that are alike: 2 x L4",
        "unknown connection: cuda:0 and cuda:1",
    ]
    assert list(describe_devices(facts("L4"), [])) == []


def test_doctor_describes_numa_nodes_if_there_are_several() -> None:
    nodes = [CpuNode(0, (0, 1), 4096, {0: 10, 1: 21}), CpuNode(1, (2, 3), 4096, {0: 21, 1: 10})]
    (finding,) = describe_numa_nodes(nodes)
    sizes = "NUMA nodes: 0 (2 CPUs, 4.00 GB), 1 (2 CPUs, 4.00 GB)"
    assert finding.text == f"{sizes}; access to the memory of another NUMA node takes up to 2.1 times as long"
    (finding,) = describe_numa_nodes([CpuNode(0, (0, 1), 4096, {}), CpuNode(1, (2, 3), 4096, {})])
    assert finding.text == sizes
    assert list(describe_numa_nodes(nodes[:1])) == []


@pytest.mark.parametrize(
    ("nodes", "ranks", "level", "text"),
    [
        (1, 1, "fine", "one NUMA node: one rank makes sense (tensor_parallel = 1)"),
        (0, 1, "fine", "one NUMA node: one rank makes sense (tensor_parallel = 1)"),
        (1, 2, "note", "tensor_parallel is 2, but there is one NUMA node: 1 rank is usually faster"),
        (2, 2, "fine", "models run on 2 ranks, one per NUMA node"),
        (2, 1, "note", "tensor_parallel is 1; try 2, which is one rank per NUMA node"),
    ],
)
def test_doctor_compares_the_number_of_ranks_with_the_number_of_numa_nodes(
    nodes: int, ranks: int, level: str, text: str
) -> None:
    finding = describe_cpu_ranks(nodes, ranks)
    assert (finding.topic, finding.level, finding.text) == ("links", level, text)


def test_doctor_says_among_how_many_devices_a_model_can_be_divided() -> None:
    (finding,) = describe_gpu_ranks(facts("L4", "L4"), 2)
    assert finding.text == "a model can be divided among up to 2 devices (tensor_parallel = 2)"
    (finding,) = describe_gpu_ranks(facts("L4", "A2"), 1)
    assert finding.text == "each model runs on one device; models cannot be divided among these devices"
    assert list(describe_gpu_ranks(facts("L4"), 1)) == []
