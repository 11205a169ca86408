"""Ranks on a machine with several NUMA nodes: which CPUs their processes may use, and their number of threads."""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil
import pytest

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import SamplingParams
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.hardware.cpus import cpu_list, physical_cores
from numa_folder import two_nodes_of_this_machine

FRANCE = [504, 3575, 282, 4649, 314]
BOUND_PROCESS = """
import json, os, sys, threading
from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.ranks import cpu_binding
from helexa.neuron.engine.ranks.cpu_binding import threads_of_rank

release = threading.Event()
threading.Thread(target=release.wait).start()
rank, ranks = map(int, sys.argv[1:])
options = EngineOptions(tensor_parallel=ranks)
cpu_binding.bind(options, rank)
cpus = {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in os.listdir("/proc/self/task")}
release.set()
configured = EngineOptions(tensor_parallel=ranks, threads=3)
print(json.dumps([list(cpus), threads_of_rank(options, rank), threads_of_rank(configured, rank)]))
"""

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two NUMA nodes need two CPUs")


def bound_process(folder: Path, rank: int, ranks: int) -> Any:
    """Return the sets of CPUs of the threads of a bound process, and its numbers of computing threads.

    The numbers are the default one, and the one with three configured threads.
    """
    command = [sys.executable, "-c", BOUND_PROCESS, str(rank), str(ranks)]
    environ = os.environ | {"NEURON_DEBUG_NUMA": str(folder)}
    return json.loads(subprocess.run(command, env=environ, capture_output=True, check=True).stdout)


def affinities(pid: int) -> list[Collection[int]]:
    """Return the CPUs that each thread of a process may use."""
    return [os.sched_getaffinity(thread.id) for thread in psutil.Process(pid).threads()]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_threads_of_a_rank_are_bound_to_its_numa_node(tmp_path: Path, rank: int) -> None:
    folder, halves = two_nodes_of_this_machine(tmp_path)
    assert bound_process(folder, rank, 2) == [[sorted(halves[rank])], physical_cores(halves[rank]), 3]


def test_threads_are_not_bound_with_one_rank_or_without_numa_nodes(tmp_path: Path) -> None:
    folder, _ = two_nodes_of_this_machine(tmp_path)
    everywhere = [sorted(os.sched_getaffinity(0))]
    assert bound_process(folder, 0, ranks=1) == [everywhere, physical_cores(), 3]
    assert bound_process(tmp_path / "nowhere", 0, ranks=2) == [everywhere, max(physical_cores() // 2, 1), 3]


async def test_processes_of_an_engine_are_bound_to_different_numa_nodes(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder, halves = two_nodes_of_this_machine(tmp_path)
    monkeypatch.setenv("NEURON_DEBUG_NUMA", str(folder))
    client = await EngineClient.start(smollm2_gguf, EngineOptions(kv_cache_mb=64, tensor_parallel=2))
    try:
        stream = client.generate(FRANCE, max_tokens=4, sampling=SamplingParams(temperature=0))
        assert [output async for output in stream][-1].error is None
        (other,) = psutil.Process(client.pid).children()
        for pid, cpus in zip((client.pid, other.pid), halves, strict=True):
            assert all(own == cpus for own in affinities(pid))
    finally:
        await client.close()
    for rank, cpus in enumerate(halves):
        assert f"bound rank={rank} numa_node={rank} cpus={cpu_list(cpus)}" in caplog.text
