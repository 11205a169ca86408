"""docs/neuron.example.toml is valid and complete, and shows the true defaults."""

from pathlib import Path

import pytest
from msgspec.structs import asdict

from helexa.core.errors import ConfigError
from helexa.core.model_source_ids import ModelSource
from helexa.neuron.config import (
    AdmissionConfig,
    ContextLimitConfig,
    GroupConfig,
    NeuronConfig,
    ResponsesConfig,
    SourceConfig,
    TorchConfig,
    read_config,
)
from helexa.neuron.engine.ipc.engine_options import EngineOptions

EXAMPLE = Path(__file__).parents[3] / "docs" / "neuron.example.toml"


@pytest.fixture
def config() -> NeuronConfig:
    return read_config(EXAMPLE, environ={})


def test_example_configuration_file_is_valid(config: NeuronConfig) -> None:
    assert [model.model_id for model in config.default_models] == ["helexa/small", "qwen3-8b"]
    source = config.default_models[1].source
    assert source is not None
    assert ModelSource.parse(source) == ModelSource("huggingface", "Qwen/Qwen3-8B-GGUF")
    assert config.harness.torch.sources["mirror"].endpoint == "https://hub.example.com"


def test_values_in_the_example_configuration_are_the_defaults(config: NeuronConfig) -> None:
    ours = {"default_models": ..., "harness": {"torch": {"sources"}}}
    assert config.model_dump(exclude=ours) == NeuronConfig().model_dump(exclude=ours)


@pytest.mark.parametrize(
    "section", [TorchConfig, AdmissionConfig, ContextLimitConfig, GroupConfig, ResponsesConfig, SourceConfig]
)
def test_example_configuration_documents_every_key(
    section: type[TorchConfig | AdmissionConfig | ContextLimitConfig | GroupConfig | ResponsesConfig | SourceConfig],
) -> None:
    lines = [line.removeprefix("# ") for line in EXAMPLE.read_text().splitlines()]
    tables = {"admission", "context_limit", "sources"}  # documented as separate tables
    missing = [key for key in section.model_fields if not any(line.startswith(f"{key} = ") for line in lines)]
    assert set(missing) <= tables


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("max_in_flight", "NEURON_HARNESS__TORCH__ADMISSION__MAX_IN_FLIGHT"),
        ("restart_window_secs", "NEURON_RECOVERY__RESTART_WINDOW_SECS"),
    ],
    ids=["batch size 0", "restart window 0"],
)
def test_value_0_of_a_setting_that_needs_a_positive_number_is_rejected(name: str, variable: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_config(None, environ={variable: "0"})


def test_debugging_options_in_the_configuration_reach_engines() -> None:
    off = {"NEURON_HARNESS__TORCH__OVERLAP": "false", "NEURON_HARNESS__TORCH__GRAPHS": "false"}
    engines = [read_config(None, environ=environ).harness.torch.engine_options("cuda:0") for environ in ({}, off)]
    assert [(options.graphs, options.overlap) for options in engines] == [(True, None), (False, False)]


def test_default_max_step_tokens_is_larger_on_gpus() -> None:
    stated = read_config(None, environ={"NEURON_HARNESS__TORCH__MAX_STEP_TOKENS": "64"}).harness.torch
    unset = NeuronConfig().harness.torch
    sizes = [
        options.engine_options(device).max_step_tokens for options in (stated, unset) for device in ("cuda", "cpu")
    ]
    assert sizes == [64, 64, 2048, 512]
    beside = [unset.engine_options(device).max_prefill_beside_decode for device in ("cuda:1", "mps")]
    assert beside == [2048, 128]


@pytest.mark.parametrize(
    ("environ", "tokens"),
    [
        ({}, 100),
        ({"NEURON_HARNESS__TORCH__MAX_SEQUENCES": "8"}, 100),
        ({"NEURON_MAX_PROMPT_TOKENS": "200"}, 200),
        ({"NEURON_HARNESS__CANDLE__CONTEXT_LIMIT__MAX_PROMPT_TOKENS": "300", "NEURON_MAX_PROMPT_TOKENS": "200"}, 300),
        (
            {
                "NEURON_HARNESS__TORCH__CONTEXT_LIMIT__MAX_PROMPT_TOKENS": "400",
                "NEURON_HARNESS__CANDLE__CONTEXT_LIMIT__MAX_PROMPT_TOKENS": "300",
                "NEURON_MAX_PROMPT_TOKENS": "200",
            },
            400,
        ),
    ],
)
def test_environment_variables_override_a_file_that_uses_the_former_engine_name(
    tmp_path: Path, environ: dict[str, str], tokens: int
) -> None:
    path = tmp_path / "neuron.toml"
    path.write_text("[harness.candle]\nmax_sequences = 3\n[harness.candle.context_limit]\nmax_prompt_tokens = 100\n")
    torch = read_config(path, environ).harness.torch
    assert torch.context_limit.max_prompt_tokens == tokens
    assert torch.max_sequences == int(environ.get("NEURON_HARNESS__TORCH__MAX_SEQUENCES", 3))


def test_neuron_variables_set_by_kubernetes_and_aws_are_ignored() -> None:
    links = {"NEURON_PORT": "tcp://10.0.0.1:13131", "NEURON_SERVICE_HOST": "10.0.0.1"}
    links |= {"NEURON_PORT_13131_TCP": "tcp://10.0.0.1:13131", "NEURON_RT_VISIBLE_CORES": "0", "NEURON_CC_FLAGS": "-O1"}
    assert read_config(None, links) == NeuronConfig()


def test_configuration_keys_for_the_engine_have_the_names_and_defaults_of_engine_options() -> None:
    """A default of None depends on the device, see `TorchConfig.engine_options`."""
    set_elsewhere = {
        "devices",
        "quant",
        "max_waiting",
        "images",
        "mmproj",
        "draft_model",
        "model_id",
    }  # by the load request and by the node
    engine = {name: value for name, value in asdict(EngineOptions()).items() if name not in set_elsewhere}
    settings = TorchConfig().model_dump(include=engine.keys(), exclude_none=True)
    assert engine.keys() <= TorchConfig.model_fields.keys()
    assert settings == {name: engine[name] for name in settings} | {"device": "auto"}
