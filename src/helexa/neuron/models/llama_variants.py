"""Architectures that differ from Llama in a few lines, such as Mistral and Phi-3.

References: transformers `modeling_mistral`, `modeling_ministral3`, `modeling_ernie4_5`, `modeling_seed_oss`,
`modeling_arcee`, `modeling_hunyuan_v1_dense`, `modeling_phi3`, `modeling_smollm3`, `modeling_stablelm`,
`modeling_glm4`, `modeling_cohere`, `modeling_cohere2`.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.layers.attention import QkNorms
from helexa.neuron.layers.block import Block, SquaredReluMlp, Step
from helexa.neuron.layers.rope import Rope, no_rotation, query_temperature
from helexa.neuron.models.llama import ATTENTION_BIAS, Llama
from helexa.neuron.models.settings import TensorNames
from helexa.neuron.ops.linear_and_norm_operators import NormOp, QueryTemperature
from helexa.neuron.tensors import Tensor

_OUTPUT_BIAS = re.compile(r"model\.layers\.\d+\.self_attn\.o_proj\.bias", re.ASCII)


class Mistral(Llama):
    """Mistral: Llama with sliding-window attention in all layers.

    If the setting `sliding_window` is null, all layers have full attention.
    """

    defaults: ClassVar = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }
    types = ("full_attention", "sliding_attention")

    def layer_type(self, index: int) -> str:
        """Return the type of all layers: sliding attention if the model has a window."""
        return "full_attention" if self.settings.config["sliding_window"] is None else "sliding_attention"


class Mistral3(Mistral):
    """The text model of Mistral Small 3.1, whose configuration omits settings."""

    defaults: ClassVar = {
        **Mistral.defaults,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000_000.0,
        "sliding_window": None,
    }


class Ministral3(Mistral):
    """Mistral with YaRN, and with queries that are scaled by their position."""

    defaults: ClassVar = {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "sliding_window": None,
    }
    types = ("full_attention", "sliding_attention")

    def temperature(self) -> QueryTemperature:
        """Return the position-dependent factor on queries, from the RoPE settings."""
        # The factor keeps attention sharp in long contexts.
        return query_temperature(self.rope_settings(self.settings.config))


class Ernie45(Llama):
    """Ernie 4.5: Llama whose rotation pairs adjacent numbers of each head."""

    defaults: ClassVar = {
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
    interleaved = True

    def prepare(self) -> None:
        """Call `Llama.prepare`, then check the biases."""
        super().prepare()
        self._require_stated_biases("use_bias", ATTENTION_BIAS)


class SeedOss(Llama):
    """Seed-OSS: Llama with attention biases, which the `Loader` reads if they exist."""

    defaults: ClassVar = {
        "attention_out_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
    }

    def prepare(self) -> None:
        """Call `Llama.prepare`, then check the bias of the attention output."""
        super().prepare()
        self._require_stated_biases("attention_out_bias", _OUTPUT_BIAS)


class Arcee(Llama):
    """Arcee: Llama with feed-forward layers without a gate, `down(relu(up(x)) ** 2)`."""

    defaults: ClassVar = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    supported: ClassVar = {"hidden_act": (None, "relu2")}
    half = False  # the square of an activation above 256 exceeds the range of float16

    def mlp(self, index: int, prefix: str) -> SquaredReluMlp:
        """Return the feed-forward layer of decoder layer `index`."""
        return SquaredReluMlp(self.loader, prefix, self.settings.hidden, self.settings.intermediate)


class HunyuanDense(Llama):
    """Hunyuan: Llama with norms on query and key heads, after the rotation."""

    defaults: ClassVar = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    names = TensorNames(head_norms=("query_layernorm", "key_layernorm"))

    def qk_norms(self) -> QkNorms:
        """Return norms of query and key heads, which are applied after the rotation."""
        return QkNorms(self.settings.eps, names=self.names.head_norms, last=True)

    def rope_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings; `alpha` scales the base of the type `dynamic`."""
        settings = super().rope_settings(config)
        alpha, width = settings.get("alpha"), self.settings.head_dim
        # With `alpha`, the type `dynamic` does not scale by length: the rotary base gets a constant factor.
        if settings["rope_type"] == "dynamic" and alpha:
            settings |= {"rope_type": "default", "rope_theta": settings["rope_theta"] * alpha ** (width / (width - 2))}
        return settings


class Phi3(Mistral):
    """Mistral with LongRoPE."""

    defaults: ClassVar = {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    }

    def rope_settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings, with LongRoPE factors from GGUF tensors if present."""
        settings = super().rope_settings(config)
        # In older Phi-3 configurations, `su` and `yarn` mean LongRoPE.
        if settings["rope_type"] in ("su", "yarn"):
            settings["rope_type"] = "longrope"
        key = "original_max_position_embeddings"
        settings[key] = config.get(key) or settings.get(key)
        half = int(self.settings.head_dim * settings["partial_rotary_factor"]) // 2
        for kind in ("long", "short"):
            if f"rope_factors_{kind}.weight" in self.loader:
                settings[f"{kind}_factor"] = self.loader.vector(f"rope_factors_{kind}.weight", half).tolist()
        return settings


class SmolLM3(Llama):
    """SmolLM3: Llama with NoPE in some layers (Kazemnejad et al., 2023)."""

    defaults: ClassVar = {
        "max_position_embeddings": 32768,
        "no_rope_layer_interval": 4,
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
    }
    types = ("full_attention", "sliding_attention")

    def prepare(self) -> None:
        """Determine the layers with rotation, then call `Llama.prepare`.

        Raises:
            ModelFileError: `no_rope_layers` is not a list of 0 or 1 per layer, or `layer_types` lists sliding attention
                but `use_sliding_window` is not true.
        """
        settings = self.settings
        rotates = settings.config.get("no_rope_layers")
        if rotates is None:
            interval = settings.positive("no_rope_layer_interval")
            rotates = [int((index + 1) % interval != 0) for index in range(settings.layers)]
        if not isinstance(rotates, list) or len(rotates) < settings.layers or not all(n in (0, 1) for n in rotates):
            raise ModelFileError(
                f"config: 'no_rope_layers' is {str(rotates)[:80]}, expected a list with 0 (no rotation) or 1 for each "
                f"of {settings.layers} layers"
            )
        self._rotates = rotates
        self._no_rotation = no_rotation(settings.head_dim, self.loader.ops)
        super().prepare()
        if "sliding_attention" in self.layer_types:
            settings.require(use_sliding_window=(True,))

    def layer_type(self, index: int) -> str:
        """Return the type of layer `index`: NoPE layers may have a sliding window."""
        config = self.settings.config
        windowed = config.get("use_sliding_window") and config.get("sliding_window") is not None
        return "sliding_attention" if windowed and not self._rotates[index] else "full_attention"

    def rope_of(self, index: int) -> Rope:
        """Return layer `index`'s rotary embedding; in a NoPE layer, it rotates nothing."""
        return super().rope_of(index) if self._rotates[index] else self._no_rotation


class StableLm(Llama):
    """StableLM: Llama with layer norms, which rotates a quarter of each head."""

    defaults: ClassVar = {"layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25}
    supported: ClassVar = {**Llama.supported, "qk_layernorm": (None, False)}

    @classmethod
    def standard_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config` with the epsilon of the layer norms as `rms_norm_eps`."""
        standard = super().standard_config(config)
        return {**standard, "rms_norm_eps": standard["layer_norm_eps"]}

    def norm(self, name: str) -> NormOp:
        """Return the layer norm with the tensors `name.weight` and `name.bias`."""
        loader, width = self.loader, self.settings.hidden
        weight, bias = (loader.vector(f"{name}.{kind}", width) for kind in ("weight", "bias"))
        return loader.ops.layer_norm(weight, bias, self.settings.eps)


class Glm4(Llama):
    """GLM-4: Llama with norms around attention and MLP; rotates half of each head.

    The rotation pairs adjacent numbers of a head.
    """

    defaults: ClassVar = {
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    }
    names = TensorNames(post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"))
    half = False
    interleaved = True


class ParallelBlock(Block):
    """Cohere's decoder layer: attention and MLP have the same normed input."""

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, cache: Any, step: Step, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream, and the sum of attention and MLP (see `Block`)."""
        x = self._mixer_norm(hidden, delta)
        delta = self.mixer(x, cache, step, rows)
        if rows is not None:
            hidden, x = self._ops.choose_rows(hidden, rows), self._ops.choose_rows(x, rows)
        return hidden, self._ops.add(delta, self._mlp(x))


class Cohere(Llama):
    """Cohere: Llama with layer norms without biases; attention and MLP in parallel.

    The rotation pairs adjacent numbers of each head.
    """

    defaults: ClassVar = {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
    implemented = ("logit_scale",)
    supported: ClassVar = {**Llama.supported, "use_qk_norm": (None, False)}
    interleaved = True

    @classmethod
    def standard_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config` with the epsilon of the layer norms as `rms_norm_eps`."""
        standard = super().standard_config(config)
        return {**standard, "rms_norm_eps": standard["layer_norm_eps"]}

    def norm(self, name: str) -> NormOp:
        """Return the layer norm `name.weight`; the final norm also scales the logits."""
        loader, width = self.loader, self.settings.hidden
        # The final norm's weight also scales the logits.
        factor = self.settings.number("logit_scale") if name == self.names.norm else 1.0
        weight = loader.vector(f"{name}.weight", width) * factor
        return loader.ops.layer_norm(weight, tensors.zeros(width, device=loader.ops.device), self.settings.eps)

    def block(self, index: int, prefix: str) -> ParallelBlock:
        """Return the decoder layer `index`."""
        norm = self.norm(f"{prefix}.input_layernorm")
        mixer, mlp = self.mixer(index, prefix), self.mlp(index, f"{prefix}.mlp")
        return ParallelBlock(self.loader, mixer, mlp, (norm, norm))


class Cohere2(Cohere):
    """Cohere with a sliding window in most layers, and NoPE in the others."""

    defaults: ClassVar = {
        **Cohere.defaults,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
    types = ("full_attention", "sliding_attention")

    def prepare(self) -> None:
        """Call `Llama.prepare`, then create a rotary embedding without rotation."""
        super().prepare()
        self._no_rotation = no_rotation(self.settings.head_dim, self.loader.ops)

    def layer_type(self, index: int) -> str:
        """Return full attention for every `sliding_window_pattern`-th layer, else sliding."""
        is_sliding = (index + 1) % self.settings.positive("sliding_window_pattern")
        return "sliding_attention" if is_sliding else "full_attention"

    def rope_of(self, index: int) -> Rope:
        """Return layer `index`'s rotary embedding; full-attention layers rotate nothing."""
        return super().rope_of(index) if self.layer_types[index] == "sliding_attention" else self._no_rotation
