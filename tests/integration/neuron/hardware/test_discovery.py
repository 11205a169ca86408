"""Hardware discovery, and the configuration file."""

import os
from pathlib import Path

import pytest

from helexa.core.errors import ConfigError
from helexa.neuron.config import read_config
from helexa.neuron.hardware.device_choice import default_device
from helexa.neuron.hardware.machine_description import discover
from helexa.neuron.hardware.nvidia_gpus import device_health
from neuron.running_node import running
from numa_folder import two_nodes_of_this_machine


def test_discovery_reports_the_hardware_of_the_machine():
    facts = discover()
    assert facts.hostname
    assert facts.os
    assert facts.cpu
    assert facts.cpu_cores >= 1
    assert facts.memory_total_mb > 0
    assert len(device_health()) == len(facts.devices)
    assert default_device() in ("cpu", "cuda:0")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two NUMA nodes need two CPUs")
async def test_numa_nodes_are_reported_if_there_are_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, halves = two_nodes_of_this_machine(tmp_path)
    for path, reported in ((folder, [len(half) for half in halves]), (folder / "node0", None)):
        monkeypatch.setenv("NEURON_DEBUG_NUMA", str(path))
        discover.cache_clear()
        async with running({}) as node:
            _, facts = await node.get("/discovery")
        nodes = facts.get("numa_nodes")
        expected = reported and [
            {"node": number, "cpus": cpus, "memory_total_mb": 4096} for number, cpus in enumerate(reported)
        ]
        assert (nodes, facts["max_tensor_parallel"]) == (expected, len(reported or [1]))
    discover.cache_clear()


def test_without_a_configuration_file_all_settings_have_their_defaults():
    config = read_config(None, {})
    assert (config.host, config.port, config.default_models) == ("127.0.0.1", 13131, [])
    options = config.harness.torch.engine_options("cpu")
    assert (options.device, options.max_step_tokens, options.max_sequences, options.max_waiting) == (
        "cpu",
        512,
        64,
        64,
    )


def test_configuration_file_may_use_the_former_name_of_the_engine(tmp_path: Path):
    path = tmp_path / "neuron.toml"
    path.write_text(
        """
        port = 1234

        [[harnesses]]
        name = "candle"

        [harness.candle]
        default_source = "mirror"
        max_sequences = 8

        [harness.candle.sources.mirror]
        endpoint = "https://mirror.example"
        auth_env = "MIRROR_TOKEN"

        [[default_models]]
        model_id = "org/name"
        harness = "candle"
        quant = "q4_k_m"
        """
    )
    config = read_config(path, {"NEURON_PORT": "4321", "NEURON_CACHE__DIR": "/models"})
    assert (config.port, config.cache.dir) == (4321, Path("/models"))
    assert config.harness.torch.default_source == "mirror"
    assert config.harness.torch.sources["mirror"].endpoint == "https://mirror.example"
    assert config.harness.torch.max_sequences == 8
    assert [(spec.model_id, spec.quant) for spec in config.default_models] == [("org/name", "q4_k_m")]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NEURON_HARNESS__TORCH__DEVICE": "tpu"}, "NEURON_HARNESS__TORCH__DEVICE"),
        ({"NEURON_DEFAULT_MODELS": '[{model_id = "a/b", quantt = "q4"}]'}, "did you mean 'quant'?"),
        ({"NEURON_HARNESSES": '[{name = "vulkan"}]'}, "torch"),
        ({"NEURON_PORT": "0"}, "NEURON_PORT"),
    ],
)
def test_configuration_error_names_the_setting(environ: dict[str, str], message: str):
    with pytest.raises(ConfigError) as refused:
        read_config(None, environ)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
