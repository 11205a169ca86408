"""Qwen3 with experts in most feed-forward layers (transformers `modeling_qwen3_moe`)."""

from helexa.neuron.models.qwen3 import Qwen3
from helexa.neuron.models.with_experts import WithExperts


class Qwen3Moe(WithExperts, Qwen3):
    """A sliding window is refused."""

    def prepare(self) -> None:
        """See `Decoder`."""
        super().prepare()
        self.settings.require(use_sliding_window=(None, False))
