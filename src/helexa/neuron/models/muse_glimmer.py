"""Muse Glimmer, the text model (reference: transformers `modeling_muse_glimmer`)."""

from typing import Any, ClassVar

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.layers.attention import QkNorms
from helexa.neuron.layers.rope import Rope, no_rotation
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.settings import TensorNames
from helexa.neuron.tensors import Tensor

_Q_NORM = "model.layers.0.self_attn.q_norm.weight"


class MuseGlimmer(Llama):
    """Muse Glimmer: Llama with norms around attention and MLP, and output gates.

    Every fourth layer has full attention without rotation, the other layers have a sliding window. The embeddings,
    queries and keys have norms without weights. The logits have a factor and a soft cap.
    """

    defaults: ClassVar = {
        "head_dim": 128,
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
        "final_logit_softcapping": 20.0,
        "output_multiplier": 0.19611613513818404,
        "post_norm_eps": 1e-8,
        "qk_scale_factor": 3.87,
    }
    implemented = ("final_logit_softcapping",)
    supported: ClassVar = {"hidden_activation": (None, "silu")}
    names = TensorNames(
        block_norms=("input_layernorm", "pre_feedforward_layernorm"),
        post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    )
    types = ("full_attention", "sliding_attention")
    gate = "gate_proj"
    half = False

    def prepare(self) -> None:
        """Call `Llama.prepare`, then find the layers without rotation.

        Raises:
            ModelFileError: `layer_rope_theta` is not a list that has, for each layer, 0 or the rotary base.
        """
        super().prepare()
        settings, ops = self.settings, self.loader.ops
        theta = self.rope_settings(settings.config).get("rope_theta")
        thetas = settings.config.get("layer_rope_theta")
        if thetas is None:
            thetas = [0 if kind == "full_attention" else theta for kind in self.layer_types]
        if not isinstance(thetas, list) or len(thetas) != settings.layers or not all(x in (0, theta) for x in thetas):
            raise ModelFileError(
                f"config: 'layer_rope_theta' is {str(thetas)[:80]}, expected a list with 0 or {theta} for each of "
                f"{settings.layers} layers"
            )
        self._thetas, self._no_rotation = thetas, no_rotation(settings.head_dim, ops)
        self._embedding_norm = ops.rms_norm(tensors.ones(settings.hidden, device=ops.device), settings.eps)

    def layer_type(self, index: int) -> str:
        """Return full attention for the last layer and every fourth before, else sliding."""
        # The layers are counted back from the last layer, which has full attention.
        return "sliding_attention" if (self.settings.layers - 1 - index) % 4 else "full_attention"

    def rope_of(self, index: int) -> Rope:
        """Return the rotary embedding of layer `index`; a base of 0 means no rotation."""
        return super().rope_of(index) if self._thetas[index] else self._no_rotation

    def qk_norms(self) -> QkNorms:
        """Return the norms of queries and keys."""
        # Only GGUF files have weights of these norms.
        return QkNorms(self.settings.eps, weighted=_Q_NORM in self.loader)

    def scale(self) -> float:
        """Return the attention scale, times `qk_scale_factor` if no norm contains it."""
        # In GGUF files, the norm of queries contains `qk_scale_factor`.
        factor = 1.0 if _Q_NORM in self.loader else self.settings.number("qk_scale_factor")
        return factor * self.settings.head_dim**-0.5

    def norm(self, name: str) -> Any:
        """Return the RMS norm `name.weight`; the final norm also scales the logits."""
        loader, settings = self.loader, self.settings
        if name == self.names.norm:
            return loader.norm(name, settings.hidden, settings.eps, factor=settings.number("output_multiplier"))
        is_post_norm = name.endswith(("post_attention_layernorm", "post_feedforward_layernorm"))
        eps = settings.fraction("post_norm_eps", 1e-8) if is_post_norm else settings.eps
        return loader.norm(name, settings.hidden, eps, 1.0)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the normalized embeddings of T token ids, as float32 [T, hidden]."""
        return self._embedding_norm(self.embedding(tokens)).float()
