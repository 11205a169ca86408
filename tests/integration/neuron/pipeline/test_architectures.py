"""Every architecture computes the same logits and tokens on one, two and three hosts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helexa.neuron.engine.ipc.messages import HostGroup
from neuron.pipeline.conftest import GroupOf
from neuron.ranks.rank_models import LIKE_OTHERS, MODELS, UNDIVIDED, logits_and_tokens
from nightly import daily
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_equal_on(group: HostGroup, model: Path, expected: tuple[Tensor, list[list[int]]], **options: Any) -> None:
    logits, tokens = logits_and_tokens(model, group, **options)
    assert tokens == expected[1]
    assert torch.equal(logits, expected[0])


@pytest.mark.parametrize("name", daily(MODELS.keys() - LIKE_OTHERS, [name for name in MODELS if name not in UNDIVIDED]))
def test_logits_of_pipeline_stages_on_two_hosts_equal_those_of_one_host(
    name: str, group_of: GroupOf, tmp_path: Path
) -> None:
    tiny_model(tmp_path, seed=2, **MODELS[name])
    assert_equal_on(group_of(2), tmp_path, logits_and_tokens(tmp_path))


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe"])
def test_logits_of_three_hosts_and_of_two_hosts_with_two_ranks_equal_those_of_one_host(
    name: str, group_of: GroupOf, tmp_path: Path
) -> None:
    tiny_model(tmp_path, seed=2, **MODELS[name] | {"num_hidden_layers": 4})
    expected = logits_and_tokens(tmp_path)
    assert_equal_on(group_of(3), tmp_path, expected)
    assert_equal_on(group_of(2), tmp_path, expected, tensor_parallel=2)


def test_logits_of_plain_torch_on_two_hosts_equal_those_of_one_host(group_of: GroupOf, tmp_path: Path) -> None:
    tiny_model(tmp_path, seed=2, **MODELS["gpt_oss"])
    options = {"kernels": "torch", "dtype": "float32"}
    assert_equal_on(group_of(2), tmp_path, logits_and_tokens(tmp_path, **options), **options)
