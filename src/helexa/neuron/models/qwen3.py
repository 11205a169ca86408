"""Qwen3 (dense): an RMS norm is applied to each query and key head (reference: transformers `modeling_qwen3`)."""

from typing import ClassVar

from helexa.neuron.models.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Qwen2 with an RMS norm on each query and key head, and with a head dimension of 128 by default."""

    defaults: ClassVar = {**Qwen2.defaults, "head_dim": 128}
    qk_norm = True
