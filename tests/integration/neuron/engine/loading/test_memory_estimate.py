"""The memory estimate of a model, made before any weight is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from helexa.neuron.engine.loading.memory_estimate import MemoryEstimate, estimate_memory
from helexa.neuron.layers.loader import Loader
from helexa.neuron.models import model_class
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.rank_group_and_shares import RankGroup
from helexa.neuron.ops.reference.reference_ops import ReferenceOps
from helexa.neuron.weights.checkpoint import Checkpoint, open_checkpoint
from helexa.neuron.weights.model_file import WHOLE, Part
from helexa.neuron.weights.quantization_formats import QuantPolicy
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor
from neuron.tensor_memory import tensor_bytes
from nightly import daily
from tiny_models import tiny_model

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
MOE = {"num_experts_per_tok": 3, "num_experts": 8, "moe_intermediate_size": 64}
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama, tied": SHAPE | {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3_moe": SHAPE | MOE | {"model_type": "qwen3_moe"},
    "glm4_moe_lite": SHAPE
    | MOE
    | {
        "model_type": "glm4_moe_lite",
        "n_routed_experts": 8,
        "kv_lora_rank": 256,
        "q_lora_rank": None,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    "gpt_oss": SHAPE | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": SHAPE | HYBRID | {"model_type": "qwen3_next"},
    "gemma4": SHAPE
    | {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 128,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": SHAPE["vocab_size"],
    },
}


def estimate_of(ops: Ops, path: Path, quant: str = "") -> MemoryEstimate:
    with open_checkpoint(path) as checkpoint:
        architecture = model_class(checkpoint.config["model_type"])
        config = architecture.standard_config(checkpoint.config)
        policy = QuantPolicy(quant, config["num_hidden_layers"])
        return estimate_memory(UnreadableCheckpoint(checkpoint), architecture, config, ops, policy)


class UnreadableCheckpoint:
    """A checkpoint that fails if a tensor is read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.config, self.total_bytes = checkpoint.config, checkpoint.total_bytes
        self.names, self.shape, self.on_meta = checkpoint.names, checkpoint.shape, checkpoint.on_meta

    def column_block(self, name: str) -> int:
        return self._checkpoint.column_block(name)

    def read(self, name: str, index: int | None = None, part: Part = WHOLE) -> Tensor:
        raise AssertionError(f"{name} was read")


@pytest.mark.parametrize("quant", ["", "q4k"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("model", daily(MODELS.keys() - {"glm4_moe_lite"}, MODELS))
def test_memory_estimate_matches_the_memory_of_a_model_on_the_cpu(
    model: str, dtype: str, quant: str, tmp_path: Path
) -> None:
    tiny_model(tmp_path, **MODELS[model])
    runner = load_once(tmp_path, EngineOptions(dtype=dtype, quant=quant, kv_cache_mb=1))
    estimate = estimate_of(runner.ops, tmp_path, quant)
    actual = tensor_bytes(runner._model, {})
    assert actual <= estimate.weights * 1.01  # the rotary tables are not counted as weights
    assert estimate.weights <= actual * 1.02
    assert estimate.page // 64 == runner.facts.token_bytes
    assert sum(cache.nbytes for cache in runner._kv_caches()) == runner.facts.kv_pages * estimate.page
    assert estimate.state == runner.facts.state_bytes
    assert (estimate.vocab_size, estimate.context) == (runner.facts.vocab_size, 512)


@pytest.mark.parametrize("quant", ["", "q4k"])
@pytest.mark.parametrize("model", MODELS)
def test_memory_estimate_matches_the_memory_of_a_model_on_a_gpu(
    model: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from helexa.neuron.ops.triton import gpu_ops

    monkeypatch.setattr(gpu_ops, "SCRATCH_BYTES", 0)
    tiny_model(tmp_path, **MODELS[model])
    ops = gpu_ops.GpuOps(torch.device("cpu"), torch.bfloat16)
    with open_checkpoint(tmp_path) as checkpoint:
        architecture = model_class(checkpoint.config["model_type"])
        config = architecture.standard_config(checkpoint.config)
        policy = QuantPolicy(quant, config["num_hidden_layers"])
        built = architecture(config, Loader(checkpoint, ops, lambda done: None, policy=policy))
    actual, estimate = tensor_bytes(built, {}), estimate_of(ops, tmp_path, quant)
    assert actual <= estimate.weights * 1.01
    assert estimate.weights <= actual * 1.02
    assert estimate.loading > 0


@pytest.mark.parametrize("quant", ["", "q4k"])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("model", daily(MODELS.keys() - {"glm4_moe_lite"}, MODELS))
def test_memory_estimate_matches_the_memory_of_each_rank(model: str, sums: bool, quant: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, **MODELS[model])
    weights: list[int] = []
    for rank in range(2):
        ops = ReferenceOps(torch.device("cpu"), torch.bfloat16)
        ops.ranks = RankGroup(rank, 2, sums)
        with open_checkpoint(tmp_path) as checkpoint:
            architecture = model_class(checkpoint.config["model_type"])
            config = architecture.standard_config(checkpoint.config)
            policy = QuantPolicy(quant, config["num_hidden_layers"])
            built = architecture(config, Loader(checkpoint, ops, lambda done: None, policy=policy))
        estimate = estimate_of(ops, tmp_path, quant)
        assert tensor_bytes(built, {}) == pytest.approx(estimate.weights, rel=0.02)
        weights.append(estimate.weights)
    assert weights[0] >= weights[1], "the request for all ranks multiplies the memory of rank 0"
    assert estimate_of(ReferenceOps(torch.device("cpu"), torch.bfloat16), tmp_path, quant).weights > 1.8 * weights[0]


def test_memory_estimate_matches_the_memory_of_smollm2(smollm2_gguf: Path) -> None:
    runner = load_once(smollm2_gguf, EngineOptions(kv_cache_mb=8))
    estimate = estimate_of(runner.ops, smollm2_gguf)
    assert estimate.weights == pytest.approx(tensor_bytes(runner._model, {}), rel=0.01)
    assert estimate.page == runner.facts.kv_bytes // runner.facts.kv_pages


def test_meta_tensor_of_a_gguf_weight_has_the_format_of_the_real_tensor(smollm2_gguf: Path) -> None:
    with open_checkpoint(smollm2_gguf) as checkpoint:
        for name in ("model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight"):
            real = checkpoint.read(name)
            meta = checkpoint.on_meta(name, tuple(real.shape))
            assert isinstance(real, GroupwiseTensor)
            assert isinstance(meta, GroupwiseTensor)
            assert meta.codes.is_meta
            assert (meta.shape, meta.nbytes) == (real.shape, real.nbytes)
            assert (meta.bits, meta.group_size, meta.zero) == (real.bits, real.group_size, real.zero)
            assert (meta.minimum is None) == (real.minimum is None)
            assert meta.scale.unit.dtype == real.scale.unit.dtype
        assert checkpoint.on_meta("model.norm.weight", (576,)).dtype == torch.float32
