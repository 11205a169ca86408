"""Unused entries of a GGUF vocabulary are never sampled."""

from pathlib import Path

import gguf
import pytest
import torch

from helexa.neuron.engine.execution.runner import Runner
from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.loading.load import load_once
from neuron.weights.hf_to_gguf import write_model
from tiny_models import decode, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
PROMPT = [5, 7, 70, 9]


def load(folder: Path, tied: bool, types: list[int], suppressed: list[int]) -> Runner:
    model = tiny_model(folder, **SHAPE, model_type="llama", tie_word_embeddings=tied)
    state = model.state_dict()
    if tied:
        del state["lm_head.weight"]

    def keys(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([f"token{number}" for number in range(len(types))])
        writer.add_token_types(types)
        if suppressed:
            writer.add_array("tokenizer.ggml.suppress_tokens", suppressed)

    return load_once(write_model(folder / "model.gguf", model.config, state, keys), EngineOptions(kv_cache_mb=1))


@pytest.mark.parametrize("tied", [False, True])
def test_unused_or_suppressed_vocabulary_entries_are_never_sampled(tied: bool, tmp_path: Path) -> None:
    plain = load(tmp_path, tied, [1] * 96, [])
    ((tokens, logits),) = decode(plain, [PROMPT])
    likeliest = sorted(set(tokens))
    unused = [token for token in likeliest if token < 90]
    types = [5 if token in unused else 1 for token in range(90)]
    suppressed = [3]
    runner = load(tmp_path, tied, types, suppressed)
    ((other_tokens, other_logits),) = decode(runner, [PROMPT])
    never = [*unused, *suppressed, *range(90, 96)]
    assert unused
    assert not set(other_tokens) & set(never)
    kept = [token for token in range(96) if token not in never]
    torch.testing.assert_close(other_logits[0, kept], logits[0, kept])
    assert float(other_logits[:, never].max()) < -9000
