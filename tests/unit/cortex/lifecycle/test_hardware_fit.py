"""Whether a node's hardware can hold a model that is divided among several devices or ranks."""

from typing import Any

import pytest

from helexa.core.catalog import Profile
from helexa.core.node_reports import Discovery
from helexa.cortex.lifecycle.memory import HOST, DevicePool, device_pools, misfit


def facts(*gpus: str, ranks: int | None = None) -> Discovery:
    """Return a node with accelerators, each named by a letter and its memory in GB, for example `A24`."""
    devices = [
        {"index": index, "name": gpu[0], "vram_total_mb": int(gpu[1:]) * 1000, "compute_capability": "9.0"}
        for index, gpu in enumerate(gpus)
    ]
    fields: dict[str, Any] = {"hostname": "n", "os": "Linux", "devices": devices}
    return Discovery.model_validate(fields | ({} if ranks is None else {"max_tensor_parallel": ranks}))


def profile(count: int, floor: int | None = None) -> Profile:
    return Profile(id="M", min_devices=count, min_device_vram_mb=floor)


@pytest.mark.parametrize(
    ("node", "needed", "pools"),
    [
        (facts(), profile(1), [DevicePool((HOST,), 1)]),
        (facts(ranks=2), profile(2), [DevicePool((HOST,), 1)]),
        (facts("A24", "B24", ranks=1), profile(1), [DevicePool((0, 1), 1)]),
        (facts("A24", "B24", "A24", ranks=2), profile(2), [DevicePool((0, 2), 2)]),
        (facts("A24", "B24", "A24", "B24", ranks=2), profile(2), [DevicePool((0, 2), 2), DevicePool((1, 3), 2)]),
        (facts("A12", "A24", "A24", ranks=3), profile(2, floor=20000), [DevicePool((1, 2), 2)]),
        (facts("A24", "B24"), profile(2), [DevicePool((0, 1), 2)]),  # an old node
    ],
)
def test_device_pools_are_the_groups_of_devices_that_can_hold_the_model(
    node: Discovery, needed: Profile, pools: list[DevicePool]
) -> None:
    assert device_pools(needed, node) == pools
    assert misfit(needed, node) is None


@pytest.mark.parametrize(
    ("node", "needed", "reason"),
    [
        (facts(), profile(2), "needs 2 devices; the node can divide a model among at most 1"),
        (facts(ranks=2), profile(3), "needs 3 devices; the node can divide a model among at most 2"),
        (facts(ranks=2), profile(2, floor=1), "needs 2 devices of 1 MB; the node has no accelerator"),
        (facts(), profile(1, floor=8000), "needs 1 device of 7.81 GB; the node has no accelerator"),
        (facts("A24", "A24", ranks=1), profile(2), "needs 2 devices; the node can divide a model among at most 1"),
        (
            facts("A24", "B24", "A12", ranks=2),
            profile(2, 20000),
            "needs 2 devices of 19.5 GB; the node has 1 that are alike",
        ),
        (facts("A24", "A24", ranks=2), profile(2, floor=30000), "needs 2 devices of 29.3 GB; the node has none"),
        (facts("A24"), profile(2), "needs 2 devices; the node has 1"),
    ],
)
def test_reason_why_a_node_cannot_hold_a_model_is_reported(node: Discovery, needed: Profile, reason: str) -> None:
    assert misfit(needed, node) == reason
    assert device_pools(needed, node) == []
