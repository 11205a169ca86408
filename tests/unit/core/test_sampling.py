"""Requests, defaults, files of models and the engine have the sampling options that `Sampling` declares."""

import json
from dataclasses import fields
from typing import get_type_hints

import msgspec
import pytest
from pydantic import ValidationError

from helexa.core.node_reports import SamplingDefaults
from helexa.core.sampling import BOUNDS, RecommendedSampling, Sampling, SamplingOptions
from helexa.core.wire.openai_chat import ChatRequest
from helexa.core.wire.openai_completions import CompletionRequest
from helexa.core.wire.responses_request import ResponsesRequest
from helexa.neuron.engine.ipc.messages import SamplingParams
from helexa.neuron.text.settings_and_sampling_defaults import defaults_in_directory

RECOMMENDED = [field.name for field in fields(RecommendedSampling)]
BODIES = {
    ChatRequest: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    CompletionRequest: {"model": "m", "prompt": "hi"},
    ResponsesRequest: {"model": "m", "input": "hi"},
}


def test_sampling_keyword_arguments_and_fields_have_the_same_names_and_types():
    assert get_type_hints(SamplingOptions) == get_type_hints(Sampling)


@pytest.mark.parametrize("api", [ChatRequest, CompletionRequest, ResponsesRequest])
@pytest.mark.parametrize("name", sorted(BOUNDS.keys() - {"max_tokens"}))
def test_requests_accept_values_at_the_sampling_bounds_and_reject_values_outside(api, name):
    low, high = BOUNDS[name].low, BOUNDS[name].high
    accepted = [low] if high is None else [low, high]
    assert [getattr(api.model_validate({**BODIES[api], name: value}), name) for value in accepted] == accepted
    for value in [low - 1] if high is None else [low - 1, high + 1]:
        with pytest.raises(ValidationError, match=name):
            api.model_validate({**BODIES[api], name: value})


@pytest.mark.parametrize("name", RECOMMENDED)
def test_configured_sampling_defaults_have_the_same_bounds_as_requests(name):
    bounds = BOUNDS[name]
    assert bounds.high is not None
    assert getattr(SamplingDefaults.model_validate({name: bounds.low}), name) == bounds.low
    for value in (bounds.low - 1, bounds.high + 1):
        with pytest.raises(ValidationError, match=name):
            SamplingDefaults.model_validate({name: value})


def test_each_recommended_sampling_option_is_read_from_generation_config(tmp_path):
    recommended = dict.fromkeys(RECOMMENDED, 1)
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    assert defaults_in_directory(tmp_path) == recommended


def test_engine_default_of_each_sampling_option_is_within_its_bounds():
    off = msgspec.structs.asdict(SamplingParams())
    names = {field.name for field in fields(Sampling)} - {"max_tokens", "stop"}  # fields of `Generate`
    assert names <= off.keys()
    assert [BOUNDS[name].nearest(off[name]) for name in BOUNDS.keys() & names] == [
        off[name] for name in BOUNDS.keys() & names
    ]
