"""Rotary embeddings with three position axes compared with transformers."""

import pytest
import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.rope import Rope, rope_settings
from helexa.neuron.ops.reference.reference_ops import ReferenceOps

OPS = ReferenceOps(torch.device("cpu"), torch.float32)
SHAPE = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}


@pytest.mark.parametrize("interleaved", [False, True], ids=["qwen2_vl", "qwen3_5"])
def test_rope_with_three_axes_assigns_frequencies_to_axes_like_transformers(interleaved: bool) -> None:
    stated = {"rope_type": "default", "rope_theta": 1e6}
    if interleaved:
        stated |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
        reference = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**SHAPE, rope_parameters=stated))
    else:
        stated |= {"mrope_section": [16, 24, 24]}
        reference = Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**SHAPE, rope_parameters=stated))
    positions = torch.randint(0, 5000, (3, 40), dtype=torch.int32)
    cos, sin = Rope(rope_settings({"rope_parameters": stated}), 128, OPS).tables(positions)
    theirs = reference(torch.zeros(1), positions[:, None])
    for ours, reference_table in zip((cos, sin), theirs, strict=True):
        torch.testing.assert_close(ours, reference_table[0, :, : reference_table.shape[-1] // 2], rtol=0, atol=5e-4)


@pytest.mark.parametrize("sections", [[16, 24], [16, 24, 25], [-1, 40, 25]])
def test_invalid_mrope_sections_are_rejected(sections: list[int]) -> None:
    stated = {"rope_type": "default", "mrope_section": sections}
    with pytest.raises(ModelFileError, match="mrope_section"):
        Rope(rope_settings({"rope_parameters": stated}), 128, OPS)
