"""Model files that a node must refuse in words: damaged ones, and ones of a kind that it does not know."""

from pathlib import Path

import gguf
import numpy as np


def truncated(whole: Path, target: Path) -> Path:
    """`whole`, cut off in the middle of its tensors."""
    with whole.open("rb") as file:
        target.write_bytes(file.read(whole.stat().st_size // 2))
    return target


def of_gemma3(target: Path) -> Path:
    """A sound GGUF file of an architecture that the engine does not have, with a tokenizer that it does."""
    writer = gguf.GGUFWriter(target, "gemma3")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [*"abcdefghijklmnopqrstuvwxyz", "<end>"]
    writer.add_token_list(letters)
    writer.add_token_types([gguf.TokenType.NORMAL] * 26 + [gguf.TokenType.CONTROL])
    writer.add_token_merges([])
    writer.add_eos_token_id(26)
    writer.add_tensor("token_embd.weight", np.zeros((len(letters), 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
