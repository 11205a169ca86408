"""Promises of memory: nobody counts on what another was promised, and what is over is forgotten."""

import os
import subprocess
import sys

import psutil
import pytest

from helexa.core.errors import DoesNotFitError
from helexa.neuron.engine.ipc.messages import MemoryGrant
from helexa.neuron.engine_client.memory_book import MemoryBook
from helexa.neuron.hardware.host_memory import own_bytes
from neuron.needing import MIB, needs

LEAST, MOST = 1232 * MIB, 1712 * MIB
"""What the engines here need, and what they take at most."""


class Machine:
    """A machine with engines that hold what they have taken."""

    def __init__(self, free_mb: int, reserve_mb: int = 0) -> None:
        self.free = free_mb * MIB
        self.held: dict[int, int] = {}
        self.generation: dict[int, float] = {}
        self.book = MemoryBook(reserve_mb * MIB, held=self.held.get, begun=self.generation.get)

    def start(self, pid: int, **fields: object) -> MemoryGrant:
        self.generation[pid] = self.generation.get(pid, 0.0) + 1
        self.held[pid] = 100 * MIB
        self.free -= 100 * MIB
        return self.book.grant(pid, needs(free=self.free, held=100 * MIB, **fields))

    def take(self, pid: int, mb: int) -> None:
        self.held[pid] += mb * MIB
        self.free -= mb * MIB

    def end(self, pid: int) -> None:
        self.free += self.held.pop(pid)
        del self.generation[pid]


def test_two_that_load_at_the_same_time_do_not_count_on_the_same_memory() -> None:
    machine = Machine(3000)
    first = machine.start(1)
    assert first.total == 1000 * MIB + 200 * MIB + 425 * MIB
    with pytest.raises(DoesNotFitError) as refused:
        machine.start(2)
    assert refused.value.details["free_mb"] == 3000 - 200 - 1625
    roomy = Machine(10_000)
    assert [roomy.start(1).total, roomy.start(2).total] == [MOST, MOST]


def test_what_was_taken_is_not_counted_twice() -> None:
    machine = Machine(4000)
    taken = machine.start(1).total // MIB
    assert taken == 1712
    machine.take(1, taken)
    assert machine.start(2).total >= LEAST


def test_what_an_engine_was_promised_ends_with_it() -> None:
    machine = Machine(3000)
    machine.start(1)
    machine.end(1)
    machine.start(2)
    machine.end(2)
    machine.start(1)  # the number comes again


def test_who_is_refused_holds_nothing_and_may_ask_again() -> None:
    machine = Machine(1500)
    with pytest.raises(DoesNotFitError):
        machine.start(1, weights=1400 * MIB)
    machine.start(2)
    machine.end(2)
    assert machine.start(1).total <= 1500 * MIB


def test_a_limit_is_for_all_together_whatever_they_have_taken() -> None:
    machine = Machine(100_000)
    limit = {"limit": 3000 * MIB}
    first = machine.start(1, **limit)
    machine.take(1, 500)
    assert first.total <= 3000 * MIB
    with pytest.raises(DoesNotFitError) as refused:
        machine.start(2, weights=1400 * MIB, **limit)
    assert refused.value.details["free_mb"] == (3000 * MIB - first.total) // MIB


def test_the_reserve_is_kept_free_but_is_no_part_of_a_limit() -> None:
    assert Machine(2000, reserve_mb=0).start(1).pages > Machine(2000, reserve_mb=500).start(1).pages
    with pytest.raises(DoesNotFitError):
        Machine(1800, reserve_mb=500).start(1)
    assert Machine(9000, reserve_mb=500).start(1, limit=LEAST).pages == 32


def test_devices_have_memory_of_their_own() -> None:
    machine = Machine(3000)
    machine.start(1, device="cuda:0")
    machine.start(2, device="cuda:1")
    machine.start(3)
    with pytest.raises(DoesNotFitError):
        machine.start(4, device="mps")  # Apple's accelerator shares that of the CPU
    with pytest.raises(DoesNotFitError):
        machine.start(5, device="cuda")  # the first that there is


def test_an_accelerators_memory_is_taken_at_once() -> None:
    machine = Machine(4000)
    machine.start(1, device="cuda:0")
    machine.free -= MOST
    with pytest.raises(DoesNotFitError):
        machine.start(2, device="cuda:0")  # the first may still be loading
    machine.held[1] += MOST  # of the host's memory, by which weights pass through
    with pytest.raises(DoesNotFitError):
        machine.start(2, device="cuda:0")
    machine.book.settle(1)
    machine.start(2, device="cuda:0")


def test_what_an_accelerator_has_given_while_a_model_loads_is_not_counted_twice() -> None:
    machine = Machine(4000)
    promised = machine.start(1, device="cuda:0").total
    machine.free -= 1000 * MIB
    with pytest.raises(DoesNotFitError):
        machine.start(2, device="cuda:0")
    machine.book.took(1, 1000 * MIB)
    granted = machine.start(2, device="cuda:0")
    assert granted.total <= machine.free - (promised - 1000 * MIB)


def test_an_engine_that_asks_again_has_still_taken_what_it_had() -> None:
    machine = Machine(4000)
    machine.start(1, device="cuda:0")
    machine.book.took(1, 1100 * MIB)
    machine.free -= 1100 * MIB
    again = needs(device="cuda:0", free=machine.free + 1100 * MIB, weights=1050 * MIB, loading=0)
    promised = machine.book.grant(1, again).total
    second = machine.start(2, device="cuda:0", weights=700 * MIB)
    assert second.total + promised - 1100 * MIB <= machine.free + 100 * MIB
    machine.book.took(99, 5)  # nobody knows it


def test_what_the_machine_cannot_give_any_more_is_missing() -> None:
    machine = Machine(4000)
    promised = machine.start(1).total
    machine.take(1, 1300)
    left = promised - 1300 * MIB
    machine.book.observe(machine.free)
    assert machine.book.missing(1) == 0
    machine.book.observe(left - 7 * MIB)  # somebody else has taken it
    assert machine.book.missing(1) == 7 * MIB
    machine.book.observe(left)
    assert machine.book.missing(1) == 0
    assert machine.book.missing(99) == 0
    machine.book.observe(0)
    assert machine.book.missing(1) == left


def test_several_share_what_is_missing() -> None:
    machine = Machine(10_000)
    machine.start(1)
    machine.start(2)
    machine.start(3, device="cuda:0")
    machine.take(1, MOST // MIB - 100)
    machine.take(2, MOST // MIB - 300)
    machine.book.observe(400 * MIB)
    assert [machine.book.missing(pid) for pid in (1, 2, 3)] == [0, 0, 0]
    machine.book.observe(200 * MIB)
    assert [machine.book.missing(pid) for pid in (1, 2, 3)] == [50 * MIB, 150 * MIB, 0]


def test_a_step_of_the_systems_clock_ends_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    book, me = MemoryBook(), os.getpid()
    book.grant(me, needs(held=own_bytes(me)))
    if hasattr(psutil, "_pslinux"):  # elsewhere, a process keeps its time
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: 0.0)
    book.observe(0)
    assert book.missing(me) > 0


def test_real_processes() -> None:
    script = "import sys; b = b'x' * (64 << 20); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.readline()
    book = MemoryBook()
    asked = needs(free=3000 * MIB, weights=0, step=0, loading=0)
    taken = own_bytes(child.pid)
    assert taken is not None
    assert 64 * MIB < taken < 120 * MIB
    promised = book.grant(child.pid, asked).total
    book.observe(1)
    assert book.missing(child.pid) == pytest.approx(promised - taken, abs=MIB)
    child.stdin.close()
    child.wait()
    child.stdout.close()
    book.observe(1)
    assert book.missing(child.pid) == 0
    assert own_bytes(child.pid) is None
