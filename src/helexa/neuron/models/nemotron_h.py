"""Nemotron-H and Nemotron 3: blocks of one sublayer, most of them Mamba-2.

Reference: transformers `modeling_nemotron_h`.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.attention import Attention
from helexa.neuron.layers.block import Mixer, SquaredReluMlp, SublayerBlock, WithoutMixing
from helexa.neuron.layers.mamba import UNLIMITED_STEPS, Mamba2
from helexa.neuron.layers.moe import LatentSpace
from helexa.neuron.layers.rope import Rope, no_rotation
from helexa.neuron.models.settings import TensorNames
from helexa.neuron.models.with_experts import WithDeepSeekExperts
from helexa.neuron.ops.state_space import ScanSizes
from helexa.neuron.tensors import Tensor

_TYPES = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}


class NemotronH(WithDeepSeekExperts):
    """A decoder of Mamba-2, attention without rotation, MLPs, and experts.

    The MLP and the experts have no gate, and their activation is the square of ReLU.
    """

    defaults: ClassVar = {
        "conv_kernel": 4,
        "head_dim": 128,
        "intermediate_size": 21504,
        "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": 64,
        "mamba_num_heads": 128,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "n_group": 1,
        "n_groups": 8,
        "n_routed_experts": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "routed_scaling_factor": 1.0,
        "ssm_state_size": 128,
        "topk_group": 1,
    }
    implemented = ("n_group", "routed_scaling_factor", "topk_group")
    supported: ClassVar = {
        "mamba_hidden_act": (None, "silu"),
        "mlp_hidden_act": (None, "relu2"),
        "sliding_window": (None,),
        "time_step_limit": UNLIMITED_STEPS,
    }
    names = TensorNames(
        embedding="model.embeddings",
        norm="model.norm_f",
        mlp="mixer",
        expert=(None, "up_proj", "down_proj"),
    )
    types = ("full_attention", "linear_attention", "mlp", "moe")
    recurrent = True
    capturable = False
    half = False

    @classmethod
    def standard_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config`, also with the keys that `Settings` and `NativeOps` read.

        Raises:
            ModelFileError: the types of the layers are missing.
        """
        standard = super().standard_config(config)
        types = standard.get("layers_block_type")
        if types is None and (pattern := standard.get("hybrid_override_pattern")) is not None:
            # Older configurations have one character per layer.
            types = [_TYPES[character] for character in pattern]
        if types is None:
            raise ModelFileError("config: 'layers_block_type', the list of the layers' types, is missing")
        standard["layer_types"] = [_OLDER_TYPES.get(kind, kind) for kind in types]
        standard["num_hidden_layers"] = len(types)
        if "moe" not in types:  # without experts, kernels need not support the default widths of experts
            standard |= dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"))
        return standard | {
            "mamba_d_head": standard["mamba_head_dim"],
            "mamba_d_state": standard["ssm_state_size"],
            "rms_norm_eps": standard["layer_norm_epsilon"],
            "shared_expert_intermediate_size": standard["moe_shared_expert_intermediate_size"],
        }

    def prepare(self) -> None:
        """Call `Llama.prepare`, then check that the model has an attention layer.

        Raises:
            ModelFileError: the model has no attention layer.
        """
        super().prepare()
        if "full_attention" not in self.layer_types:
            raise ModelFileError("config: no layer in 'layers_block_type' has attention, expected at least one")

    def ropes(self) -> dict[str, Rope]:
        """Return a rotary embedding that rotates nothing, for all layers."""
        return dict.fromkeys(self.types, no_rotation(self.settings.head_dim, self.loader.ops))

    def block(self, index: int, prefix: str) -> SublayerBlock:
        """Return the decoder layer `index`: a norm and one sublayer."""
        return SublayerBlock(self.loader, self.mixer(index, prefix), self.norm(f"{prefix}.norm"))

    def mixer(self, index: int, prefix: str) -> Mixer:
        """Return the sublayer of layer `index`: Mamba-2, attention or feed-forward."""
        loader, settings, prefix = self.loader, self.settings, f"{prefix}.mixer"
        kind = self.layer_types[index]
        if kind == "linear_attention":
            sizes = ScanSizes(
                settings.positive("mamba_num_heads"),
                settings.positive("n_groups"),
                settings.positive("mamba_head_dim"),
                settings.positive("ssm_state_size"),
                settings.positive("conv_kernel"),
            )
            return Mamba2(loader, prefix, hidden=settings.hidden, sizes=sizes, eps=settings.eps)
        if kind == "full_attention":
            return Attention(
                loader,
                prefix,
                hidden=settings.hidden,
                heads=settings.heads,
                kv_heads=settings.kv_heads,
                head_dim=settings.head_dim,
                rope=self.rope_of(index),
            )
        return WithoutMixing(loader, self.mlp(index, prefix))

    def has_experts(self, index: int) -> bool:
        """Return whether layer `index` has experts."""
        return self.layer_types[index] == "moe"

    def mlp(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        """Return the feed-forward layer of layer `index`: experts or an MLP."""
        if self.has_experts(index):
            return super().mlp(index, prefix)
        return SquaredReluMlp(self.loader, prefix, self.settings.hidden, self.settings.intermediate)

    def latent(self, prefix: str) -> LatentSpace | None:
        """Return the projections before and after the experts (see `LatentSpace`).

        The result is None without the setting `moe_latent_size`. Nemotron 3 Super has the setting.
        """
        if self.settings.config.get("moe_latent_size") is None:
            return None
        names = f"{prefix}.fc1_latent_proj", f"{prefix}.fc2_latent_proj"
        return LatentSpace(self.loader, names, self.settings.hidden, self.settings.positive("moe_latent_size"))

    def shared(self, prefix: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the MLP that all rows use in addition to the chosen experts."""
        width = self.settings.positive("moe_shared_expert_intermediate_size")
        mlp = SquaredReluMlp(self.loader, f"{prefix}.shared_experts", self.settings.hidden, width)
        return lambda x, out: self.loader.ops.add(out, mlp(x))
