"""Every architecture computes the same logits and tokens on one, two and three ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron.ranks.rank_models import MODELS, STEPS, loaded, logits_and_tokens
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_native_logits_of_several_ranks_equal_those_of_one(name: str, ranks: int, tmp_path: Path) -> None:
    tiny_model(tmp_path, seed=2, **MODELS[name])
    expected, expected_tokens = logits_and_tokens(tmp_path)
    logits, tokens = logits_and_tokens(tmp_path, tensor_parallel=ranks)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_5_moe"])
def test_each_rank_holds_its_part_of_the_weights(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each rank has at most 5 % more than its part; the routers, of which each rank has a copy, are a part of these."""
    caplog.set_level("INFO")
    wide = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096, "num_attention_heads": 8, "head_dim": 32}
    experts = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    heads = {"num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    tiny_model(tmp_path, **MODELS[name] | wide | (experts | heads if name == "qwen3_5_moe" else {}))
    with loaded(tmp_path) as runner:
        whole = runner._model.loader.matrix_bytes / 2**20
    for ranks in (2, 4):
        caplog.clear()
        with loaded(tmp_path, tensor_parallel=ranks):
            pass
        sizes = [float(size) for size in re.findall(rf"rank \d of {ranks}: (\d+\.\d+) MiB of weights", caplog.text)]
        assert len(sizes) == ranks
        assert max(sizes) <= 1.05 * whole / ranks


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_5_moe"])
def test_logits_over_gloo_are_close_to_those_of_one_rank(name: str, tmp_path: Path) -> None:
    assert_close_to_one_rank(name, tmp_path, 2, kernels="torch", dtype="float32", tensor_parallel_mode="exact")


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("name", MODELS)
def test_logits_from_partial_sums_are_close_to_those_of_one_rank(name: str, ranks: int, tmp_path: Path) -> None:
    assert_close_to_one_rank(name, tmp_path, ranks, kernels="torch", dtype="float32", tensor_parallel_mode="sum")


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe"])
def test_native_logits_from_partial_sums_are_close_to_those_of_one_rank(name: str, tmp_path: Path) -> None:
    """Only the first token of each prompt is compared, because later tokens may differ."""
    tiny_model(tmp_path, seed=2, **MODELS[name])
    expected, _ = logits_and_tokens(tmp_path)
    logits, _ = logits_and_tokens(tmp_path, tensor_parallel=2, tensor_parallel_mode="sum")
    torch.testing.assert_close(logits[::STEPS], expected[::STEPS], rtol=0, atol=0.02 * float(expected.std()))


def assert_close_to_one_rank(name: str, folder: Path, ranks: int, **options: Any) -> None:
    tiny_model(folder, seed=2, **MODELS[name])
    expected, expected_tokens = logits_and_tokens(folder, **options)
    logits, tokens = logits_and_tokens(folder, tensor_parallel=ranks, **options)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
