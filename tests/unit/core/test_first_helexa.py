"""Today's servers read the configuration files of the first helexa, with one warning per file."""

import logging
from pathlib import Path

import pytest

from helexa.core import catalog
from helexa.cortex import config as cortex_config
from helexa.neuron.config import read_config

FILES = Path(__file__).parents[2] / "first_helexa"


def test_neuron_toml_of_the_rust_version_is_read_with_warnings() -> None:
    warnings: list[str] = []
    settings = read_config(FILES / "neuron.toml", environ={}, warn=warnings.append)
    assert settings.harness.torch.snapshot_mb == 2048
    assert settings.harness.torch.admission.max_in_flight == 8
    former_settings, address = warnings
    assert "harness.candle.prefix_cache.budget_mb sets harness.candle.snapshot_mb" in former_settings
    assert "the node listens on 127.0.0.1, and the first helexa listened on 0.0.0.0" in address


def test_explicit_address_of_the_node_gives_no_warning_about_the_changed_default() -> None:
    warnings: list[str] = []
    settings = read_config(FILES / "neuron.toml", environ={"NEURON_HOST": "0.0.0.0"}, warn=warnings.append)
    assert settings.host == "0.0.0.0"
    assert not any("listened on" in warning for warning in warnings)


def test_node_variables_of_the_rust_version_still_have_their_effect() -> None:
    environ = {
        "NEURON_MAX_PROMPT_TOKENS": "4096",
        "NEURON_PREFILL_CHUNK_TOKENS": "256",
        "NEURON_MIN_FREE_VRAM_MB": "512",
        "NEURON_TP_STEP_TIMEOUT_S": "90",
    }
    settings = read_config(FILES / "neuron.toml", environ=environ, warn=lambda _: None)
    assert settings.harness.torch.context_limit.max_prompt_tokens == 4096
    assert settings.harness.torch.max_step_tokens == 256
    assert settings.harness.torch.context_limit.min_free_floor_mb == 512
    assert settings.recovery.step_timeout_secs == 90


@pytest.mark.parametrize("name", ["NEURON_USE_CHAT_TEMPLATE", "NEURON_VISION_MAX_PIXELS", "NEURON_DEBUG_POISON"])
def test_node_variables_of_the_rust_version_without_effect_cause_a_warning(name: str) -> None:
    warnings: list[str] = []
    read_config(None, environ={name: "1", "NEURON_HOST": "127.0.0.1"}, warn=warnings.append)
    (warning,) = warnings
    assert f"{name} has no effect" in warning


def test_cortex_toml_of_the_rust_version_is_read_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings = cortex_config.load(FILES / "cortex.toml")
    assert [neuron.name for neuron in settings.neurons] == ["beast", "benjy"]
    (message,) = _warnings(caplog)
    assert "upstream has no effect" in message
    assert "secret" not in message


def test_nodes_in_cortex_toml_of_the_rust_version_become_openai_servers(caplog: pytest.LogCaptureFixture) -> None:
    settings = cortex_config.load(FILES / "cortex_with_nodes.toml")
    assert [(neuron.name, neuron.kind) for neuron in settings.neurons] == [
        ("gpu-large", "openai"),
        ("gpu-small", "openai"),
    ]
    (message,) = _warnings(caplog)
    assert "nodes sets neurons" in message


def test_models_toml_of_the_rust_version_is_read() -> None:
    loaded = catalog.load(FILES / "models.toml")
    (flagship,) = [profile for profile in loaded.models if profile.id == "Qwen/Qwen3.6-27B"]
    assert flagship.harness == "torch"
    assert flagship.sampling is not None
    assert flagship.sampling.temperature == 0.6


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in messages if "first helexa" in message]
