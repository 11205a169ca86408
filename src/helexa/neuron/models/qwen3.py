"""Qwen3 (dense): each query and key head is normalized before rotation (transformers `modeling_qwen3`)."""

from typing import ClassVar

from helexa.neuron.models.qwen2 import Qwen2


class Qwen3(Qwen2):
    """Qwen2 with norms of query and key heads; the head dimension may differ from hidden / heads."""

    defaults: ClassVar = {**Qwen2.defaults, "head_dim": 128}
    qk_norm = True
