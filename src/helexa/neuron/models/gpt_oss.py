"""gpt-oss: experts, attention sinks, and sliding windows in half of the layers.

Reference: transformers `modeling_gpt_oss`.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from helexa.neuron import tensors
from helexa.neuron.layers.moe import ExpertReader, SparseMoe
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.with_experts import expert_counts
from helexa.neuron.ops.expert_routing_and_mixture import Clamp, Routing
from helexa.neuron.ops.rank_group_and_shares import RowRange, part_of
from helexa.neuron.tensors import Tensor
from helexa.neuron.weights.model_file import Part
from helexa.neuron.weights.quantized_matrix import GroupwiseTensor, Weight


class GptOss(Llama):
    """gpt-oss: Llama with attention sinks, attention biases and experts."""

    defaults: ClassVar = {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    types = ("full_attention", "sliding_attention")
    sinks = True

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`: sliding attention if `index` is even."""
        return "full_attention" if index % 2 else "sliding_attention"

    def mlp(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        """Return the feed-forward layer of layer `index`, a mixture of experts."""
        settings = self.settings
        count, top_k = expert_counts(settings)
        return SparseMoe(
            self.loader,
            f"{prefix}.router",
            GptOssReader(self.loader, f"{prefix}.experts", count),
            Routing(top_k, "scores"),
            hidden=settings.hidden,
            intermediate=settings.intermediate,
            clamp=Clamp(settings.number("swiglu_alpha"), settings.number("swiglu_limit")),
        )


class GptOssReader(ExpertReader):
    """Reads the experts of Hugging Face's gpt-oss: gate and up rows alternate.

    In these checkpoints, unquantized expert matrices are transposed: [inputs, outputs] instead of [outputs, inputs].
    """

    def matrix(
        self, name: str, shape: tuple[int, int], expert: int, ranges: Sequence[RowRange], columns: RowRange | None
    ) -> Any:
        """Return a part of one expert's matrix, with all gate rows before all up rows."""
        # Only names in GGUF files end with `.weight`. These files have separate gate and up tensors with [outputs,
        # inputs], so the rows need no change.
        if name.endswith(".weight"):
            return super().matrix(name, shape, expert, ranges, columns)
        return self.loader.prepared(
            f"{name}#{expert}", shape, lambda: self._arranged(name, shape, expert, ranges, columns), ranges, columns
        )

    def biases(self, name: str, width: int) -> Tensor:
        """Return the biases of all E experts, float32 [E, width], gate biases first."""
        biases = super().biases(name, width)
        return _gate_first(biases.T).T if name.endswith(".gate_up_proj_bias") else biases

    def _arranged(
        self, name: str, shape: tuple[int, int], expert: int, ranges: Sequence[RowRange], columns: RowRange | None
    ) -> Weight:
        alternating = name.endswith(".gate_up_proj")
        # Gate and up rows alternate in the checkpoint, so this rank's rows of both are one range.
        part = part_of((ranges[0].times(2, total=shape[0]),) if alternating else ranges, columns)
        if isinstance(self.loader.checkpoint.on_meta(name, shape), Tensor):  # not quantized, so transposed
            transposed = self.loader.weight(name, (self.count, *shape[::-1]), expert, Part(part.columns, part.rows))
            assert isinstance(transposed, Tensor)
            weight = transposed.T.contiguous()
        else:
            weight = self.loader.weight(name, (self.count, *shape), expert, part)
        if not alternating:
            return weight
        return weight.each(_gate_first) if isinstance(weight, GroupwiseTensor) else _gate_first(weight)


def _gate_first(rows: Tensor) -> Tensor:
    """Reorder alternating gate and up rows: all gate rows, then all up rows."""
    return tensors.cat((rows[0::2], rows[1::2]))
