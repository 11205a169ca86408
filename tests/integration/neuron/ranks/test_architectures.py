"""Every architecture computes the same logits and tokens on one, two and three ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scheduler_runs import generate, recorded_preemptions, scheduler_of

from neuron.ranks.rank_models import MODELS, NAMES, PROMPTS, STEPS, loaded, logits_and_tokens
from nightly import daily
from tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS = daily([3], [2, 3])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_native_logits_of_several_ranks_equal_those_of_one_rank(name: str, ranks: int, tmp_path: Path) -> None:
    tiny_model(tmp_path, seed=2, **MODELS[name])
    expected, expected_tokens = logits_and_tokens(tmp_path)
    logits, tokens = logits_and_tokens(tmp_path, tensor_parallel=ranks)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("ranks", daily([4], [2, 4]))
@pytest.mark.parametrize("name", ["qwen2", "qwen3_5_moe"])
def test_each_rank_holds_its_part_of_the_weights(
    name: str, ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank has at most 5 % more than an equal part of the weights, for example its own copy of the routers."""
    caplog.set_level("INFO")
    wide = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096, "num_attention_heads": 8, "head_dim": 32}
    experts = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    heads = {"num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    tiny_model(tmp_path, **MODELS[name] | wide | (experts | heads if name == "qwen3_5_moe" else {}))
    with loaded(tmp_path) as runner:
        whole = runner._model.loader.matrix_bytes / 2**20
    caplog.clear()
    with loaded(tmp_path, tensor_parallel=ranks):
        pass
    sizes = [float(size) for size in re.findall(rf"rank=\d ranks={ranks} weights_mb=(\d+\.\d+)", caplog.text)]
    assert len(sizes) == ranks
    assert max(sizes) <= 1.05 * whole / ranks


@pytest.mark.parametrize("name", daily(["gpt_oss"], ["llama", "gpt_oss", "qwen3_5_moe"]))
def test_logits_of_ranks_that_exchange_over_gloo_are_close_to_those_of_one_rank(name: str, tmp_path: Path) -> None:
    assert_close_to_one_rank(name, tmp_path, 2, kernels="torch", dtype="float32", tensor_parallel_mode="exact")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", daily(["gemma3", "qwen3_5_moe"], MODELS))
def test_logits_of_ranks_that_add_partial_sums_are_close_to_those_of_one_rank(
    name: str, ranks: int, tmp_path: Path
) -> None:
    assert_close_to_one_rank(name, tmp_path, ranks, kernels="torch", dtype="float32", tensor_parallel_mode="sum")


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe"])
def test_native_logits_of_ranks_that_add_partial_sums_are_close_to_those_of_one_rank(name: str, tmp_path: Path) -> None:
    """Only the first token of each prompt is compared, because later tokens may differ."""
    tiny_model(tmp_path, seed=2, **MODELS[name])
    expected, _ = logits_and_tokens(tmp_path)
    logits, _ = logits_and_tokens(tmp_path, tensor_parallel=2, tensor_parallel_mode="sum")
    torch.testing.assert_close(logits[::STEPS], expected[::STEPS], rtol=0, atol=0.02 * float(expected.std()))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"kv_dtype": "int8"}),
        ("gemma4, shared keys", {"kv_dtype": "int8"}),
        ("qwen3_5_moe", {"snapshot_mb": 8}),
    ],
    ids=str,
)
def test_preemption_and_prefix_hits_on_two_ranks_do_not_change_the_tokens(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted = recorded_preemptions(monkeypatch)
    tiny_model(tmp_path, seed=2, **MODELS[name])
    prompts = [PROMPTS[-1][-length:] for length in (130, 60, 61, 62)]  # the outputs of the last three need a new page
    with loaded(tmp_path, tensor_parallel=2, **options) as runner:
        alone = [generate(runner, scheduler_of(runner, prefix_reuse="off"), [prompt], STEPS)[0] for prompt in prompts]
        scheduler = scheduler_of(runner, pages=6)
        assert generate(runner, scheduler, prompts, STEPS) == alone
        assert preempted
        cached = scheduler.queues.cached_tokens
        assert generate(runner, scheduler, prompts[:1], STEPS) == alone[:1]
        assert scheduler.queues.cached_tokens > cached


def assert_close_to_one_rank(name: str, folder: Path, ranks: int, **options: Any) -> None:
    tiny_model(folder, seed=2, **MODELS[name])
    expected, expected_tokens = logits_and_tokens(folder, **options)
    logits, tokens = logits_and_tokens(folder, tensor_parallel=ranks, **options)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
