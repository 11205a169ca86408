"""Qwen3 (dense): each query and key head is normalised before rotation (transformers `modeling_qwen3`)."""

from typing import ClassVar

from helexa.neuron.models.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Windows are those of Qwen2; the head dimension need not be hidden / heads."""

    defaults: ClassVar = {**Qwen2.defaults, "head_dim": 128}
    qk_norm = True
