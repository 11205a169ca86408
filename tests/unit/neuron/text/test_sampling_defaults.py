"""Sampling defaults in a model's files, and their combination with request fields."""

import json

import pytest

from helexa.core.wire.openai_chat import ChatRequest
from helexa.neuron.requests.sampling_and_context_limit import output_limit, sampling_params
from helexa.neuron.text.settings_and_sampling_defaults import defaults_in_directory, defaults_in_gguf


def request(**fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]} | fields
    return ChatRequest.parse(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0},
        ),
        ({"repetition_penalty": 1.05, "do_sample": True, "typical_p": 0.5}, {"repetition_penalty": 1.05}),
        ({"top_p": None, "min_p": "x", "temperature": True, "top_k": [1]}, {}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": None, "max_new_tokens": 5, "eos_token_id": [1, 2]}, {}),
    ],
)
def test_sampling_defaults_are_read_from_generation_config(tmp_path, config, defaults):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert defaults_in_directory(tmp_path) == defaults


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", '{"temperature": NaN}', '{"temperature": 1e999}', "\0" * 9])
def test_invalid_generation_config_yields_no_sampling_defaults(tmp_path, text):
    assert defaults_in_directory(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(text)
    assert defaults_in_directory(tmp_path) == {}


def test_sampling_defaults_are_read_from_gguf_metadata():
    metadata = {"temp": 0.6, "top_k": 20, "top_p": "x", "penalty_repeat": float("inf")}
    defaults = defaults_in_gguf({f"general.sampling.{key}": value for key, value in metadata.items()})
    assert defaults == {"temperature": 0.6, "top_k": 20}


def test_request_overrides_model_sampling_defaults_which_override_fallbacks(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "max_new_tokens": 5}))
    defaults = defaults_in_directory(tmp_path)
    from_file = sampling_params(request(), defaults)
    assert (from_file.temperature, from_file.top_k, from_file.top_p) == (0.6, 20, 1.0)
    from_request = sampling_params(request(temperature=1.5, top_p=0.5), defaults)
    assert (from_request.temperature, from_request.top_k, from_request.top_p) == (1.5, 20, 0.5)
    fallbacks = sampling_params(request(), {})
    assert (fallbacks.temperature, fallbacks.top_k, fallbacks.top_p) == (0.7, 0, 1.0)
    assert output_limit([1], request().output_limit, 100) == 99


def test_model_default_temperature_0_applies_unless_the_request_sets_another():
    assert sampling_params(request(), {"temperature": 0.0}).temperature == 0.0
    assert sampling_params(request(temperature=1), {"temperature": 0.0}).temperature == 1.0
