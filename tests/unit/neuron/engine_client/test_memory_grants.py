"""Memory grants: two engines never count on the same memory, and a grant ends with its process."""

import os
import subprocess
import sys

import psutil
import pytest

from helexa.core.errors import DoesNotFitError
from helexa.neuron.engine.ipc.messages import MemoryGrant
from helexa.neuron.engine_client.memory_grants import MemoryGrants
from helexa.neuron.hardware.host_memory import own_bytes
from neuron.memory_requests import MIB, needs

LEAST, MOST = 1232 * MIB, 1712 * MIB
"""Smallest and largest grant of an engine with the default request of `needs`."""


class Machine:
    """A simulated host: free memory, and the memory that each engine process holds."""

    def __init__(self, free_mb: int, reserve_mb: int = 0) -> None:
        self.free = free_mb * MIB
        self.held: dict[int, int] = {}
        self.generation: dict[int, float] = {}
        self.grants = MemoryGrants(reserve_mb * MIB, private_bytes=self.held.get, started_at=self.generation.get)

    def start(self, pid: int, **fields: object) -> MemoryGrant:
        self.generation[pid] = self.generation.get(pid, 0.0) + 1
        self.held[pid] = 100 * MIB
        self.free -= 100 * MIB
        return self.grants.grant(pid, needs(free=self.free, held=100 * MIB, **fields))

    def take(self, pid: int, mb: int) -> None:
        self.held[pid] += mb * MIB
        self.free -= mb * MIB

    def end(self, pid: int) -> None:
        self.free += self.held.pop(pid)
        del self.generation[pid]


def test_concurrent_loads_are_not_granted_the_same_free_memory() -> None:
    machine = Machine(3000)
    first = machine.start(1)
    assert first.total == 1000 * MIB + 200 * MIB + 425 * MIB
    with pytest.raises(DoesNotFitError) as rejected:
        machine.start(2)
    assert rejected.value.details["free_mb"] == 3000 - 200 - 1625
    roomy = Machine(10_000)
    assert [roomy.start(1).total, roomy.start(2).total] == [MOST, MOST]


@pytest.mark.parametrize(
    ("free_mb", "limit_mb", "permanent"),
    [
        (3000, 0, False),  # the first engine has the memory
        (9000, 2000, False),
        (9000, 2300, False),
        (1300, 0, None),  # the second engine does not run alone either
        (9000, 1200, None),
    ],
)
def test_rejection_of_a_load_is_permanent_only_if_an_empty_node_is_too_small(
    free_mb: int, limit_mb: int, permanent: bool | None
) -> None:
    machine = Machine(free_mb)
    limit = limit_mb * MIB
    if permanent is None:
        machine.start(1, weights=100 * MIB, loading=0, step=0, context=64, limit=limit)
    else:
        machine.start(1, limit=limit)
        machine.take(1, 900)
    with pytest.raises(DoesNotFitError) as rejected:
        machine.start(2, limit=limit)
    assert rejected.value.details["permanent"] is (permanent is None)


def test_available_memory_is_the_limit_minus_reserve_and_grants() -> None:
    machine = Machine(9000, reserve_mb=100)
    granted = machine.start(1).total
    assert machine.grants.available("cpu", machine.free) == machine.free - 100 * MIB - granted
    assert machine.grants.available("cpu", machine.free, 2000 * MIB) == 2000 * MIB - granted
    assert machine.grants.available("cpu", machine.free, 1 * MIB) == 0
    assert machine.grants.available("cuda:0", machine.free, 2000 * MIB) == 2000 * MIB
    assert (machine.grants.granted(1), machine.grants.granted(2)) == (granted, 0)


def test_granted_memory_that_an_engine_has_allocated_is_not_counted_twice() -> None:
    machine = Machine(4000)
    granted_mb = machine.start(1).total // MIB
    assert granted_mb == 1712
    machine.take(1, granted_mb)
    assert machine.start(2).total >= LEAST


def test_memory_grant_ends_with_the_engine_process() -> None:
    machine = Machine(3000)
    machine.start(1)
    machine.end(1)
    machine.start(2)
    machine.end(2)
    machine.start(1)  # the process id is reused


def test_engine_whose_request_is_rejected_holds_no_grant_and_can_retry() -> None:
    machine = Machine(1500)
    with pytest.raises(DoesNotFitError):
        machine.start(1, weights=1400 * MIB)
    machine.start(2)
    machine.end(2)
    assert machine.start(1).total <= 1500 * MIB


def test_memory_limit_covers_the_grants_of_all_engines() -> None:
    machine = Machine(100_000)
    limit = {"limit": 3000 * MIB}
    first = machine.start(1, **limit)
    machine.take(1, 500)
    assert first.total <= 3000 * MIB
    with pytest.raises(DoesNotFitError) as rejected:
        machine.start(2, weights=1400 * MIB, **limit)
    assert rejected.value.details["free_mb"] == (3000 * MIB - first.total) // MIB


def test_memory_reserve_is_never_granted_and_does_not_reduce_the_memory_limit() -> None:
    assert Machine(2000, reserve_mb=0).start(1).pages > Machine(2000, reserve_mb=500).start(1).pages
    with pytest.raises(DoesNotFitError):
        Machine(1800, reserve_mb=500).start(1)
    assert Machine(9000, reserve_mb=500).start(1, limit=LEAST).pages == 32


def test_models_on_different_gpus_do_not_compete_for_memory() -> None:
    machine = Machine(3000)
    machine.start(1, device="cuda:0")
    machine.start(2, device="cuda:1")
    machine.start(3)
    with pytest.raises(DoesNotFitError):
        machine.start(4, device="mps")  # Apple's GPU shares the host's memory
    with pytest.raises(DoesNotFitError):
        machine.start(5, device="cuda")  # the first GPU


def test_grant_for_several_ranks_counts_on_each_device() -> None:
    both = {"device": "cuda:0", "devices": ["cuda:0", "cuda:1"]}
    machine = Machine(3000)
    machine.start(1, **both)
    for device in ("cuda:0", "cuda:1"):
        with pytest.raises(DoesNotFitError):
            machine.start(2, device=device)
    with pytest.raises(DoesNotFitError):
        machine.start(2, device="cuda:2", devices=["cuda:2", "cuda:1"])
    machine.start(2, device="cuda:2", devices=["cuda:2", "cuda:3"])
    machine.start(3)  # host memory


def test_grant_for_several_ranks_is_limited_by_the_fullest_device() -> None:
    machine = Machine(10_000)
    machine.start(1, device="cuda:1", weights=2000 * MIB)
    machine.start(2, device="cuda:0")
    with pytest.raises(DoesNotFitError) as rejected:
        machine.start(3, device="cuda:0", devices=["cuda:0", "cuda:1"], weights=8000 * MIB)
    assert rejected.value.details["free_mb"] == 10_000 - 3 * 100 - 2712, "the larger grant counts, not both grants"
    limit = {"limit": 5000 * MIB}
    with pytest.raises(DoesNotFitError) as rejected:
        machine.start(4, device="cuda:0", devices=["cuda:0", "cuda:1"], weights=4000 * MIB, **limit)
    assert rejected.value.details["free_mb"] == 5000 - 2712


def test_settled_gpu_engine_keeps_its_whole_grant_reserved() -> None:
    machine = Machine(4000)
    machine.start(1, device="cuda:0")
    machine.free -= MOST
    with pytest.raises(DoesNotFitError):
        machine.start(2, device="cuda:0")  # the first engine may still be loading
    machine.held[1] += MOST  # host memory, through which the weights are copied
    with pytest.raises(DoesNotFitError):
        machine.start(2, device="cuda:0")
    machine.grants.settle(1)
    machine.start(2, device="cuda:0")


def test_gpu_memory_reported_while_loading_is_not_counted_twice() -> None:
    machine = Machine(4000)
    promised = machine.start(1, device="cuda:0").total
    machine.free -= 1000 * MIB
    with pytest.raises(DoesNotFitError):
        machine.start(2, device="cuda:0")
    machine.grants.record_allocated(1, 1000 * MIB)
    granted = machine.start(2, device="cuda:0")
    assert granted.total <= machine.free - (promised - 1000 * MIB)


def test_second_memory_request_of_an_engine_keeps_its_reported_gpu_memory() -> None:
    machine = Machine(4000)
    machine.start(1, device="cuda:0")
    machine.grants.record_allocated(1, 1100 * MIB)
    machine.free -= 1100 * MIB
    second_request = needs(device="cuda:0", free=machine.free + 1100 * MIB, weights=1050 * MIB, loading=0)
    promised = machine.grants.grant(1, second_request).total
    second = machine.start(2, device="cuda:0", weights=700 * MIB)
    assert second.total + promised - 1100 * MIB <= machine.free + 100 * MIB
    machine.grants.record_allocated(99, 5)  # unknown process: ignored


def test_granted_memory_that_is_no_longer_free_is_reported_as_missing() -> None:
    machine = Machine(4000)
    promised = machine.start(1).total
    machine.take(1, 1300)
    outstanding = promised - 1300 * MIB
    machine.grants.observe(machine.free)
    assert machine.grants.missing(1) == 0
    machine.grants.observe(outstanding - 7 * MIB)  # another process has taken 7 MiB
    assert machine.grants.missing(1) == 7 * MIB
    machine.grants.observe(outstanding)
    assert machine.grants.missing(1) == 0
    assert machine.grants.missing(99) == 0
    machine.grants.observe(0)
    assert machine.grants.missing(1) == outstanding


def test_missing_memory_is_divided_among_engines_by_their_unused_grants() -> None:
    machine = Machine(10_000)
    machine.start(1)
    machine.start(2)
    machine.start(3, device="cuda:0")
    machine.take(1, MOST // MIB - 100)
    machine.take(2, MOST // MIB - 300)
    machine.grants.observe(400 * MIB)
    assert [machine.grants.missing(pid) for pid in (1, 2, 3)] == [0, 0, 0]
    machine.grants.observe(200 * MIB)
    assert [machine.grants.missing(pid) for pid in (1, 2, 3)] == [50 * MIB, 150 * MIB, 0]


def test_change_of_the_system_clock_does_not_end_a_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    grants, me = MemoryGrants(), os.getpid()
    grants.grant(me, needs(held=own_bytes(me)))
    if hasattr(psutil, "_pslinux"):  # on other systems, psutil does not use the boot time
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: 0.0)
    grants.observe(0)
    assert grants.missing(me) > 0


def test_memory_grant_shrinks_by_the_memory_that_a_real_process_has_allocated() -> None:
    script = "import sys; b = b'x' * (64 << 20); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    grants = MemoryGrants()
    request = needs(free=3000 * MIB, weights=0, step=0, loading=0)
    allocated = own_bytes(child.pid)
    assert allocated is not None
    assert 64 * MIB < allocated < 120 * MIB
    promised = grants.grant(child.pid, request).total
    grants.observe(1)
    assert grants.missing(child.pid) == pytest.approx(promised - allocated, abs=MIB)
    child.stdin.close()
    child.wait()
    child.stdout.close()
    grants.observe(1)
    assert grants.missing(child.pid) == 0
    assert own_bytes(child.pid) is None
