"""A model with `min_devices = 2` on a fleet of nodes without GPUs, of which one has two NUMA nodes."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from clients.stack import Server, get, post
from numa_folder import two_nodes_of_this_machine
from ports import free_port

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two NUMA nodes need two CPUs")


@dataclass
class Fleet:
    """A gateway in front of the nodes `one` and `two`, which have one and two NUMA nodes."""

    url: str
    two_url: str
    two: Server
    numa_nodes: list[set[int]]

    def engine(self) -> psutil.Process:
        """Return the engine process on the node `two`."""
        children = psutil.Process(self.two.process.pid).children()
        (engine,) = [child for child in children if "helexa.neuron.engine.process" in child.cmdline()]
        return engine


@pytest.fixture(scope="module")
def fleet(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    numa, numa_nodes = two_nodes_of_this_machine(folder / "numa")
    urls = {name: f"http://127.0.0.1:{free_port()}" for name in ("one", "two")}
    (folder / "neuron.toml").write_text("[harness.torch]\nkv_cache_mb = 64\n")
    (folder / "models.toml").write_text(f'[[models]]\nid = "wide"\nsource = "file:{smollm2_gguf}"\nmin_devices = 2\n')
    (folder / "cortex.toml").write_text(
        'models_config = "models.toml"\n'
        '[gateway]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\npoll_interval_secs = 0.2\n'
        f'[ledger]\nurl = "sqlite:{folder}/cortex.db"\n'
        + "".join(f'[[neurons]]\nname = "{name}"\nendpoint = "{url}"\n' for name, url in urls.items())
    )
    servers: dict[str, Server] = {}
    try:
        for name, url in urls.items():
            arguments = ("--config", str(folder / "neuron.toml"), "--port", url.rpartition(":")[2])
            topology = str(numa if name == "two" else folder / "nowhere")
            servers[name] = Server("helexa.neuron", arguments, folder / f"{name}.log", NEURON_DEBUG_NUMA=topology)
        servers["cortex"] = cortex = Server(
            "helexa.cortex", ("serve", "-c", str(folder / "cortex.toml")), folder / "cortex.log"
        )
        listening = re.compile(r"listening url=(http://\S+) metrics_url=")
        url = cortex.until(lambda: listening.search(cortex.log.read_text()), "the gateway listens")[1]
        cortex.until(lambda: all("discovery" in node for node in get(f"{url}/api/nodes")["nodes"]), "the nodes are up")
        yield Fleet(url, urls["two"], servers["two"], numa_nodes)
    finally:
        for server in reversed(servers.values()):
            server.end()


def test_model_that_needs_two_devices_can_run_only_on_the_node_that_allows_two_ranks(fleet: Fleet) -> None:
    (model,) = get(f"{fleet.url}/v1/models")["data"]
    assert model["feasible_on"] == ["two"]
    first, _ = get(f"{fleet.url}/api/explain?model=wide")["candidates"]
    reason = "cannot hold it: needs 2 devices; the node can divide a model among at most 1"
    assert (first["node"], first["verdict"]) == ("one", reason)


def test_request_for_a_model_with_two_ranks_loads_the_model_on_two_numa_nodes(fleet: Fleet) -> None:
    body = {"model": "wide", "messages": [{"role": "user", "content": "The capital of France?"}], "max_tokens": 8}
    status, headers, answer = post(f"{fleet.url}/v1/chat/completions", body | {"temperature": 0})
    assert (status, answer["usage"]["completion_tokens"] > 0) == (200, True)
    assert headers["x-helexa-route"].startswith("node=two;")
    (model,) = get(f"{fleet.two_url}/models")
    assert (model["id"], model["tensor_parallel"]) == ("wide", 2)
    ranks = [fleet.engine(), *fleet.engine().children()]
    affinities = [os.sched_getaffinity(rank.pid) for rank in ranks]
    assert affinities == fleet.numa_nodes
