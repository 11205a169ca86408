"""Granite: Llama with multipliers, and with experts, sliding windows or Mamba-2.

References: transformers `modeling_granite`, `modeling_granitemoe`, `modeling_granite_swa`,
`modeling_granitemoehybrid`.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron.layers.block import GatedMlp, Mixer
from helexa.neuron.layers.mamba import UNLIMITED_STEPS, Mamba2
from helexa.neuron.layers.moe import ExpertReader, SparseMoe
from helexa.neuron.layers.rope import Rope, no_rotation
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.settings import TensorNames
from helexa.neuron.models.with_experts import expert_counts
from helexa.neuron.ops.expert_routing_and_mixture import Routing
from helexa.neuron.ops.state_space import ScanSizes
from helexa.neuron.tensors import Tensor

_OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
_CONV_BIAS = re.compile(r"model\.layers\.\d+\.mamba\.conv1d\.bias", re.ASCII)
_PROJECTION_BIAS = re.compile(r"model\.layers\.\d+\.mamba\.(?:in|out)_proj\.bias", re.ASCII)


class Granite(Llama):
    """Llama with constant factors on embeddings, layer outputs, scores and logits."""

    defaults: ClassVar = {
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    }
    implemented = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")

    def prepare(self) -> None:
        """Call `Llama.prepare`, then check the multipliers."""
        super().prepare()
        self._residual = self.settings.number("residual_multiplier")
        # The multipliers need no additional operations, because other factors and weights contain them. The residual
        # stream is kept divided by `residual_multiplier`, so that layers add their outputs unchanged.
        self._embedding = self.settings.number("embedding_multiplier") / self._residual
        self._logits = self.settings.number("logits_scaling")

    def scale(self) -> float:
        """Return the attention scale: the setting `attention_multiplier`."""
        return self.settings.number("attention_multiplier")

    def norm(self, name: str) -> Any:
        """Return the RMS norm of x for inputs x / `residual_multiplier`.

        The final norm also divides its output by `logits_scaling`.
        """
        # With r = `residual_multiplier`, the norm of x / r with epsilon / r**2 is the norm of x. The final norm's
        # weight also divides the logits.
        eps = self.settings.eps / self._residual**2
        factor = 1 / self._logits if name == self.names.norm else 1.0
        return self.loader.norm(name, self.settings.hidden, eps, factor=factor)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings * `embedding_multiplier` / `residual_multiplier`, [T, hidden]."""
        return self.embedding(tokens, self._embedding)


class GraniteMoe(Granite):
    """Granite with experts in each layer, and an optional MLP beside the experts."""

    defaults: ClassVar = {
        **Granite.defaults,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "shared_intermediate_size": 0,
    }
    names = TensorNames(mlp="block_sparse_moe")

    @classmethod
    def standard_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config`, also with the key `shared_expert_intermediate_size`."""
        standard = super().standard_config(config)
        return standard | {"shared_expert_intermediate_size": standard["shared_intermediate_size"]}

    def mlp(self, index: int, prefix: str) -> Callable[[Tensor], Tensor]:
        """Return the feed-forward layer: experts, an MLP, or the sum of both."""
        loader, settings, hidden = self.loader, self.settings, self.settings.hidden
        mlp = self._shared_mlp(f"{prefix.removesuffix(self.names.mlp)}shared_mlp")
        if mlp is not None and settings.config["num_local_experts"] == 0:
            return mlp
        count, top_k = expert_counts(settings)
        if f"{prefix}.input_linear.weight" in loader:
            # Safetensors files stack gate and up of all experts in one tensor.
            names = ("input_linear", "input_linear", "output_linear")
            router, reader = f"{prefix}.router.layer", ExpertReader(loader, prefix, count, names)
        else:
            router, reader = f"{prefix}.router", ExpertReader(loader, f"{prefix}.experts", count)
        return SparseMoe(
            loader,
            router,
            reader,
            Routing(top_k, "scores"),
            hidden=hidden,
            intermediate=settings.intermediate,
            shared=None if mlp is None else lambda x, out: loader.ops.add(out, mlp(x)),
        )

    def _shared_mlp(self, prefix: str) -> GatedMlp | None:
        """Return the MLP that all rows use; None if the model has no such MLP."""
        settings = self.settings
        if settings.config["shared_intermediate_size"] == 0:
            return None
        # In safetensors files, gate and up are one tensor.
        fused = f"{prefix}.input_linear.weight" in self.loader
        return GatedMlp(
            self.loader,
            prefix,
            hidden=settings.hidden,
            intermediate=settings.positive("shared_intermediate_size"),
            names=("gate_proj", "up_proj", "output_linear") if fused else self.names.projections,
            fused="input_linear",
        )


class GraniteSwa(Granite):
    """Granite with attention sinks, and a sliding window in three of four layers."""

    defaults: ClassVar = {
        **Granite.defaults,
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "tie_word_embeddings": True,
    }
    types = ("full_attention", "sliding_attention")
    sinks = True

    def prepare(self) -> None:
        """Call `Granite.prepare`, then create a rotary embedding for each base frequency.

        Raises:
            ModelFileError: `layer_rope_theta` does not have 0 or a positive, finite number per layer.
        """
        super().prepare()
        settings = self.settings
        thetas = settings.config.get("layer_rope_theta")
        # Not `isinstance`, because a bool is an int in Python.
        if thetas is not None and not (
            isinstance(thetas, list)
            and len(thetas) == settings.layers
            and all(type(theta) in (int, float) and 0 <= theta < math.inf for theta in thetas)
        ):
            raise ModelFileError(
                f"config: 'layer_rope_theta' is {str(thetas)[:80]}, expected a list with 0 or a positive number for "
                f"each of {settings.layers} layers"
            )
        self._thetas: list[float] | None = thetas
        self._rope_by_theta: dict[float, Rope] = {0.0: no_rotation(settings.head_dim, self.loader.ops)}
        for theta in set(thetas or ()) - {0}:
            parameters = {**(settings.config.get("rope_parameters") or {}), "rope_theta": theta}
            self._rope_by_theta[theta] = self.rope({**settings.config, "rope_parameters": parameters})

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`: layers 0, 4, 8, ... have full attention."""
        return "sliding_attention" if index % 4 else "full_attention"

    def rope_of(self, index: int) -> Rope:
        """Return the rotary embedding of layer `index`; a base of 0 means no rotation."""
        return super().rope_of(index) if self._thetas is None else self._rope_by_theta[self._thetas[index]]


class GraniteMoeHybrid(GraniteMoe):
    """Granite with Mamba-2 in layers of the type `linear_attention`."""

    defaults: ClassVar = {
        **GraniteMoe.defaults,
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "shared_intermediate_size": 1024,
    }
    supported: ClassVar = {
        "hidden_act": (None, "silu"),
        "position_embedding_type": (None, "nope", "rope"),
        "time_step_limit": UNLIMITED_STEPS,
    }
    types = ("full_attention", "linear_attention")
    recurrent = True
    capturable = False

    @classmethod
    def standard_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config` with current names of layer types, and the Mamba-2 head width."""
        standard = super().standard_config(config)
        types = standard.get("layer_types") or standard.get("layers_block_type")
        if types is not None:
            standard["layer_types"] = [_OLDER_TYPES.get(kind, kind) for kind in types]
        if standard["mamba_d_head"] == "auto":
            standard["mamba_d_head"] = standard["mamba_expand"] * standard["hidden_size"] // standard["mamba_n_heads"]
        return standard

    def prepare(self) -> None:
        """Call `GraniteMoe.prepare`, then check the layer types and the biases of Mamba-2.

        Raises:
            ModelFileError: no layer has attention, or the checkpoint has other biases than the configuration.
        """
        super().prepare()
        if "full_attention" not in self.layer_types:
            raise ModelFileError("config: no layer in 'layer_types' has attention, expected at least one")
        self._require_stated_biases("mamba_conv_bias", _CONV_BIAS)
        self._require_stated_biases("mamba_proj_bias", _PROJECTION_BIAS)

    def layer_type(self, index: int) -> str:
        """Return `linear_attention` (Mamba-2), for configurations without `layer_types`."""
        return "linear_attention"

    def ropes(self) -> Mapping[str, Rope]:
        """Return a rotary embedding per layer type; by default, it rotates nothing."""
        if self.settings.config.get("position_embedding_type") == "rope":
            return super().ropes()
        # Most of these models do not rotate queries and keys.
        return dict.fromkeys(self.types, no_rotation(self.settings.head_dim, self.loader.ops))

    def mixer(self, index: int, prefix: str) -> Mixer:
        """Return the mixer of layer `index`: attention or Mamba-2."""
        if self.layer_types[index] == "full_attention":
            return super().mixer(index, prefix)
        settings = self.settings
        sizes = ScanSizes(
            settings.positive("mamba_n_heads"),
            settings.positive("mamba_n_groups"),
            settings.positive("mamba_d_head"),
            settings.positive("mamba_d_state"),
            settings.positive("mamba_d_conv"),
        )
        return Mamba2(self.loader, f"{prefix}.mamba", hidden=settings.hidden, sizes=sizes, eps=settings.eps)
