"""Verifies and times exchanges between ranks, in a process of `neuron smoke`.

    python -m helexa.neuron.engine.ranks.collective_check RANKS

The process starts the other ranks, and prints a list of `CollectiveResult` in JSON.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

import msgspec

from helexa.neuron import tensors
from helexa.neuron.engine.ipc import ENVIRONMENT
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import CollectiveResult
from helexa.neuron.engine.ranks import cpu_binding
from helexa.neuron.engine.ranks.rank import exchange_for
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.native.kernel_library import Unavailable, native_kernels
from helexa.neuron.ops.native.native_ops import NativeOps
from helexa.neuron.ops.rank_group_and_shares import RankGroup, SharedMemory, Shares
from helexa.neuron.tensors import Tensor

_COLUMNS = 1536
_ROWS = (1, 16, 512)
_TIMES = 50
_SECONDS = 30.0


def check(group: RankGroup, memory_fd: int, rendezvous: Path) -> Iterator[CollectiveResult]:
    """Run all collectives on this rank, and yield their results.

    All ranks must call this function and consume all results, because each exchange waits for all ranks.

    Args:
        memory_fd: descriptor from `SharedMemory.create`.
        rendezvous: path of a file that does not exist yet, at which the ranks meet.
    """
    cpu_binding.bind(EngineOptions(tensor_parallel=group.count), group.rank)
    if not tensors.torch_is_installed():
        tensors.use("numpy")
    tensors.set_num_threads(1)
    for name, ops in _kernels():
        ops.ranks = group
        ops.connect(exchange_for(ops, group, memory_fd, rendezvous, _SECONDS))
        shares = Shares.split(_COLUMNS, group.count, group.rank, 16)
        for rows in _ROWS:
            whole = tensors.arange(rows * _COLUMNS, dtype=tensors.float32).view(rows, _COLUMNS)
            own = whole[:, shares.own.start : shares.own.stop].contiguous()
            verified = tensors.equal(ops.gather(own, shares), whole)
            seconds = [_timed(ops, own, shares) for _ in range(_TIMES)]
            yield CollectiveResult("gather", name, whole.nbytes, verified, median(seconds) * 1e6)
            total = whole * (group.count * (group.count + 1) // 2)
            verified = tensors.equal(ops.sum_ranks(whole * (group.rank + 1)), total)
            yield CollectiveResult("sum", name, whole.nbytes, verified, None)


def _kernels() -> Iterator[tuple[str, Ops]]:
    with suppress(Unavailable):
        yield "shared memory", NativeOps(native_kernels(), 1)
    if tensors.uses_torch():
        from helexa.neuron.ops.reference.reference_ops import ReferenceOps

        yield "gloo", ReferenceOps(tensors.device("cpu"), tensors.float32)


def _timed(ops: Ops, own: Tensor, shares: Shares) -> float:
    begin = time.perf_counter()
    ops.gather(own, shares)
    return time.perf_counter() - begin


def main() -> None:
    """Run the check as rank 0, or as the rank that rank 0 has started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--memory-fd", type=int)
    parser.add_argument("--rendezvous", type=Path)
    arguments = parser.parse_args()
    if arguments.rank:
        for _ in check(RankGroup(arguments.rank, arguments.ranks), arguments.memory_fd, arguments.rendezvous):
            pass
        return
    memory_fd = SharedMemory.create()
    with tempfile.TemporaryDirectory(prefix="helexa-ranks-") as folder:
        rendezvous = Path(folder) / "store"
        others = [_start(rank, arguments.ranks, memory_fd, rendezvous) for rank in range(1, arguments.ranks)]
        try:
            results = list(check(RankGroup(0, arguments.ranks), memory_fd, rendezvous))
        finally:
            for other in others:
                other.kill()
    sys.stdout.write(msgspec.json.encode(results).decode())


def _start(rank: int, ranks: int, memory_fd: int, rendezvous: Path) -> subprocess.Popen[bytes]:
    arguments = ["--rank", str(rank), "--memory-fd", str(memory_fd), "--rendezvous", str(rendezvous)]
    command = [sys.executable, "-P", "-m", "helexa.neuron.engine.ranks.collective_check", str(ranks), *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT | os.environ, pass_fds=(memory_fd,))


if __name__ == "__main__":
    main()
