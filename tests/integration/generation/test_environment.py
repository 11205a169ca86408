"""The library's environment variables and their aliases."""

import pytest

from helexa.core.errors import ConfigError
from helexa.generation import environment
from helexa.generation.private import EngineSettings
from helexa.generation.target_choice import ModelLocation
from helexa.neuron.sources.hubs_and_sources import _limit


@pytest.mark.parametrize("name", ["HELEXA_NUM_PARALLEL", "CANDLE_NUM_PARALLEL"])
def test_variable_num_parallel_sets_the_number_of_concurrent_requests(small, monkeypatch, name):
    assert small.open().width == 64
    monkeypatch.setenv(name, "3")
    assert small.open().width == 3


@pytest.mark.parametrize("name", ["HELEXA_FORCE_F32", "CANDLE_FORCE_F32"])
@pytest.mark.parametrize(("value", "dtype"), [("1", "float32"), ("true", "float32"), ("0", "auto"), ("", "auto")])
def test_variable_force_f32_selects_float32(monkeypatch, name, value, dtype):
    monkeypatch.setenv(name, value)
    assert EngineSettings().config().harness.torch.dtype == dtype


def test_arguments_override_environment_variables(monkeypatch):
    monkeypatch.setenv("HELEXA_FORCE_F32", "1")
    monkeypatch.setenv("HELEXA_DEVICE", "cuda:1")
    torch = EngineSettings(device="cpu", dtype="bf16").config().harness.torch
    assert (torch.device, torch.dtype) == ("cpu", "bfloat16")


def test_option_context_length_selects_a_private_engine_instead_of_a_server():
    location = ModelLocation(context_length=512)
    assert location.is_private
    assert EngineSettings(context_length=512).config().harness.torch.context_length == 512


def test_variable_helexa_device_selects_a_private_engine_on_the_named_device(monkeypatch):
    monkeypatch.setenv("HELEXA_DEVICE", "cuda:1")
    assert EngineSettings().config().harness.torch.device == "cuda:1"
    assert ModelLocation().is_private


def test_variable_helexa_model_names_the_default_model(monkeypatch):
    monkeypatch.setenv("HELEXA_MODEL", "org/other")
    assert ModelLocation().wanted_model == "org/other"
    assert ModelLocation(model="org/own").wanted_model == "org/own"


@pytest.mark.parametrize("name", ["HELEXA_MAX_CONCURRENT_DOWNLOADS", "MAX_CONCURRENT_DOWNLOADS"])
def test_variable_max_concurrent_downloads_limits_downloads(name):
    assert _limit({name: "3"}) == 3
    assert _limit({}) == 8


def test_variables_with_the_prefix_helexa_override_their_aliases():
    names = {"HELEXA_NUM_PARALLEL": "5", "CANDLE_NUM_PARALLEL": "6"}
    assert environment.number("HELEXA_NUM_PARALLEL", names) == 5


@pytest.mark.parametrize(
    ("read", "name", "value"),
    [
        (environment.number, "HELEXA_NUM_PARALLEL", "many"),
        (environment.number, "CANDLE_NUM_PARALLEL", "0"),
        (environment.flag, "HELEXA_FORCE_F32", "maybe"),
        (environment.flag, "CANDLE_FORCE_F32", "2"),
    ],
)
def test_error_for_an_invalid_value_names_the_environment_variable(read, name, value):
    known = next((ours for ours, alias in environment.ALIASES.items() if alias == name), name)
    with pytest.raises(ConfigError, match=name):
        read(known, {name: value})


def test_unknown_device_is_a_config_error():
    with pytest.raises(ConfigError, match="device"):
        EngineSettings(device="toaster").config()
