"""Hosts for tests of pipeline parallelism: members of a host group at loopback addresses."""

import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from helexa.core.version import node_code_version
from helexa.neuron.config import NeuronConfig
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.host_channel import HostAddress
from helexa.neuron.engine.ipc.messages import HostGroup
from helexa.neuron.engine_client.client import EngineClient
from helexa.neuron.stage_processes import StageProcesses, accept_engines

SECRET = b"the secret of the tests' hosts"

GroupOf = Callable[[int], HostGroup]
"""Function that returns a group with this number of hosts, including host 0."""


@asynccontextmanager
async def running(model: Path, group: HostGroup | None, **settings: Any) -> AsyncIterator[EngineClient]:
    options = EngineOptions(kv_cache_mb=64, threads=1, **settings.pop("options", {}))
    client = await EngineClient.start(model, options, group=group, **settings)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: with tiny models, more threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextmanager
def hosts(**context_limit: int) -> Iterator[GroupOf]:
    """Run two hosts, at 127.0.0.2 and 127.0.0.3, that start stage processes of one thread.

    Args:
        context_limit: options of the hosts' table `[harness.torch.context_limit]`.
    """
    harness = {"threads": 1, "device": "cpu", "context_limit": context_limit}
    stages = StageProcesses(NeuronConfig.model_validate({"harness": {"torch": harness}}))
    listeners = [socket.create_server((address, 0)) for address in ("127.0.0.2", "127.0.0.3")]
    threads = [threading.Thread(target=accept_engines, args=(listener, SECRET, stages)) for listener in listeners]
    for thread in threads:
        thread.start()
    addresses = [HostAddress(*listener.getsockname()) for listener in listeners]
    try:
        yield lambda count: HostGroup(
            hosts=addresses[: count - 1], own_address="127.0.0.1", secret=SECRET, version=node_code_version()
        )
    finally:
        stages.close()
        for listener, thread in zip(listeners, threads, strict=True):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends the accept call
            listener.close()
            thread.join()


@pytest.fixture(scope="module")
def group_of() -> Iterator[GroupOf]:
    """Function that returns a group with this number of hosts, including host 0."""
    with hosts() as group_of:
        yield group_of
