"""Class attributes of models with mixins."""

from typing import ClassVar

import pytest

from helexa.neuron.models.deepseek import DeepSeekV3
from helexa.neuron.models.qwen import Qwen3
from helexa.neuron.models.with_experts import WithDeepSeekExperts, WithExperts


def test_model_class_that_inherits_an_attribute_from_two_bases_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Mixed must set '(defaults|implemented|supported)', because .* both set it"):
        type("Mixed", (WithDeepSeekExperts, Qwen3), {})


def test_model_class_that_sets_the_attributes_of_both_bases_is_accepted() -> None:
    class Mixed(WithDeepSeekExperts, Qwen3):
        defaults: ClassVar = {**WithDeepSeekExperts.defaults, **Qwen3.defaults}
        supported: ClassVar = {**WithDeepSeekExperts.supported}

    assert Mixed.qk_norm


def test_model_class_with_a_base_that_overrides_the_other_base_is_accepted() -> None:
    class Mixed(DeepSeekV3, WithExperts):
        pass

    assert Mixed.defaults is DeepSeekV3.defaults
