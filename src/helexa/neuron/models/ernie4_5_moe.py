"""Ernie 4.5 with experts, in a range of layers.

Reference: transformers `modeling_ernie4_5_moe`.
"""

from typing import ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.moe import SharedExpert
from helexa.neuron.models.mixture_config import WithExperts
from helexa.neuron.ops.mixture import Routing


class Ernie45Moe(WithExperts):
    """Llama that rotates adjacent numbers of each head, with experts.

    The value of an expert is its share of the softmax over all scores. A trained bias of each expert counts for the
    choice only.
    """

    defaults: ClassVar = {
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
    interleaved = True

    def has_experts(self, index: int) -> bool:
        """Return whether layer `index` has experts."""
        config, layers = self.settings.config, self.settings.layers
        first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
        if type(first) is not int or type(last) is not int:
            raise ModelFileError("config: 'moe_layer_start_index' and 'moe_layer_end_index' must be whole numbers")
        if not first <= index <= (layers - 1 if last == -1 else last):
            return False
        # Of these layers, those whose number, counted from 1, is a multiple of the interval.
        return (index + 1) % self.settings.positive("moe_layer_interval") == 0

    def routing(self, prefix: str, count: int, top_k: int) -> Routing:
        """Return the rule with the bias of the choice, [1, E] in the checkpoint."""
        bias = self.loader.plain(f"{prefix}.moe_statics.e_score_correction_bias", (1, count))
        return Routing(top_k, "normalized", bias=bias.view(count))

    def shared(self, prefix: str) -> SharedExpert | None:
        """Return `moe_num_shared_experts` experts as one wider expert without a gate."""
        if not self.settings.config["moe_num_shared_experts"]:
            return None
        width = self.settings.positive("moe_num_shared_experts") * self.expert_width()
        names = f"{prefix}.shared_experts", None
        return SharedExpert(self.loader, *names, hidden=self.settings.hidden, intermediate=width)
