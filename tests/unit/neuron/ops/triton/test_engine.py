"""An engine on the Triton kernels in the interpreter, including captured graphs and overlap."""

from pathlib import Path
from typing import Any

import pytest
from scheduler_runs import generate, scheduler_of
from torch import Tensor

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.execution.step_builder_and_penalties import build_step
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.ipc.messages import Generate, SamplingParams
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.scheduling.plan import PlanEntry
from helexa.neuron.engine.scheduling.sequence import Sequence
from nightly import daily
from tiny_models import tiny_model

PROMPTS = [[(7 + 11 * i * i) % 96 for i in range(length)] for length in (2, 65)]
TOKENS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 1},
    "qwen3_moe": {
        "num_hidden_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "qwen3_5_text": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "gemma4_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 40,
        "global_head_dim": 32,
        "num_kv_shared_layers": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 96,
        "final_logit_softcapping": 10.0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}


@pytest.mark.parametrize("model_type", daily(MODELS.keys() - {"gemma4_text"}, MODELS))
def test_tokens_of_the_engine_with_triton_kernels_match_the_reference(model_type: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, model_type=model_type, **SHAPE, **MODELS[model_type])
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_mb": 1, "max_sequences": 2, "speculation": False}
    reference = load_once(tmp_path, EngineOptions(**options, kernels="torch"))
    expected = [generate(reference, scheduler_of(reference, max_sequences=2), [p], TOKENS)[0] for p in PROMPTS]
    runner = load_once(tmp_path, EngineOptions(**options, kernels="triton"))
    assert runner.ops.name == "triton"
    runner.warm_up()
    assert runner.buckets, "they could not be recorded"
    scheduler = scheduler_of(runner, max_sequences=2, speculation=False)
    assert generate(runner, scheduler, PROMPTS, TOKENS, overlap=True) == expected


def test_int8_kv_cache_halves_memory_and_hardly_changes_logits(tmp_path: Path) -> None:
    tiny_model(tmp_path, model_type="qwen3", **SHAPE, num_hidden_layers=1)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_mb": 1, "max_sequences": 2, "speculation": False}
    plain = load_once(tmp_path, EngineOptions(**options, kernels="torch"))
    runner = load_once(tmp_path, EngineOptions(**options, kernels="triton", kv_dtype="int8"))
    assert runner.facts.token_bytes == 2 * (16 + 4)  # one head, plus the scales
    assert plain.facts.token_bytes == 2 * 16 * 4
    prompt = PROMPTS[1]

    def logits(runner: Runner) -> Tensor:
        runner.clear([2])
        request = Generate(id=0, prompt=prompt, max_tokens=1, sampling=SamplingParams())
        return runner.logits_of(build_step([PlanEntry(Sequence(request, pages=[2, 0]), len(prompt))]))

    exact = logits(plain)
    assert (logits(runner) - exact).abs().max() < 0.02 * exact.std()
