"""Write a checkpoint with random bfloat16 weights, to measure an architecture with `perf/engine.py`.

usage: python perf/random_model.py SHAPE FOLDER

SHAPE is one of:
    hybrid  the text model of Qwen3.5-0.8B: 24 layers, 18 of them with Gated DeltaNet
    moe     a Qwen3 mixture of experts: 12 layers, each with 16 experts, of which a token uses 2
    moe256  the same with 6 layers and 256 small experts, of which a token uses 8
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM


def _mixture(**sizes: Any) -> PreTrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=32_000,
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=4,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        **sizes,
    )


SHAPES: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "hybrid": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(
            vocab_size=248_320,
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=24,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            tie_word_embeddings=True,
        ),
    ),
    "moe": (
        Qwen3MoeForCausalLM,
        _mixture(num_hidden_layers=12, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=1024),
    ),
    "moe256": (
        Qwen3MoeForCausalLM,
        _mixture(num_hidden_layers=6, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=256),
    ),
}


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    kind, config = SHAPES[arguments.shape]
    kind(config).bfloat16().save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
