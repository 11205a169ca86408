"""Model files that a node must reject: damaged files and unknown architectures."""

from pathlib import Path

import gguf
import numpy as np


def truncated(model: Path, target: Path) -> Path:
    """Write the first half of the file `model` to `target`."""
    with model.open("rb") as file:
        target.write_bytes(file.read(model.stat().st_size // 2))
    return target


def mamba_model(target: Path, tokenizer: str = "llama") -> Path:
    """Write a valid GGUF file with the unsupported architecture `mamba`.

    Args:
        target: path of the file.
        tokenizer: `llama`, as in such files, or `gpt2`, which helexa can read.
    """
    tokens = ["a", "b", "ab", "<end>"]
    writer = gguf.GGUFWriter(target, "mamba")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 3 + [gguf.TokenType.CONTROL])
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
