"""Draft heads: layers that predict tokens from hidden states of a model.

A draft head computes one row for each token of a sequence except the first token. The inputs of a row are the embedding
of the token, and the hidden states that the model computed at the position before the token. The output is the logits
of the token that follows. To predict a further token, the head reads its own output instead of the model's hidden
states. The head uses the model's token embedding.

MTP (multi-token prediction, as in DeepSeek-V3, 2024) of Qwen3-Next and Qwen3.5 is one full-attention layer that is
built like the model's layers. It reads the model's hidden states after the final norm. The checkpoint of the model
contains the head. The head uses the model's output head.

EAGLE-3 (Li et al., 2025) is one Llama layer that reads the inputs of three layers of the model. The head has its own
checkpoint folder. Its output head may have a smaller vocabulary than the model. Reference: `LlamaForCausalLMEagle3` of
SpecForge.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from helexa.core.errors import ModelFileError, UnsupportedModelError
from helexa.neuron import tensors
from helexa.neuron.layers.attention import Attention
from helexa.neuron.layers.block import Mixer, Step
from helexa.neuron.layers.loader import Loader, require_shape
from helexa.neuron.layers.parallel import Embedding
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.qwen import Qwen3Next, Qwen35, Qwen35Moe
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.linear_and_norm_operators import LinearOp, NormOp
from helexa.neuron.ops.rank_group_and_shares import RowRange
from helexa.neuron.tensors import Tensor

_EAGLE_LAYERS = 3  # number of layers of the model whose inputs an EAGLE-3 head reads
# Settings of EAGLE-3 heads that are not implemented. A head is accepted if these settings are missing, null or false.
_EAGLE_FLAGS = frozenset({"norm_before_fc", "norm_before_residual", "norm_output", "fc_norm", "parallel_drafting"})


class DraftHead(Decoder):
    """A mixin for decoders that predict tokens from the hidden states of a model.

    Args:
        model: the model whose hidden states the head reads; None to build the head without weights, for a memory
            estimate.

    Attributes:
        targets: for each token id of the head, the token id of the model; None if both have the same token ids.
    """

    targets: NDArray[np.int64] | None = None

    def __init__(self, config: dict[str, Any], loader: Loader, model: Decoder | None = None) -> None:
        self._model = model
        super().__init__(config, loader)
        self._inputs = tensors.zeros(0, self.settings.hidden)

    def allocate(self, rows: int) -> None:
        """Allocate memory for hidden states of at most `rows` rows, before `set_inputs`."""
        # Captured graphs read the hidden states at a fixed address.
        self._inputs = tensors.zeros(rows, self.settings.hidden, device=self.loader.ops.device)

    @tensors.inference_mode()
    def set_inputs(self, states: NDArray[np.float32]) -> None:
        """Set the hidden states for all rows of the next pass, [rows, hidden]."""
        self._inputs[: len(states)].copy_(tensors.from_numpy(states))

    def read_embedding(self) -> Embedding:
        """Return the model's token embedding, computed with the kernels of this head."""
        if self._model is None:
            return Embedding(self.loader.ops, None, self.loader.shares(self.settings.positive("vocab_size")))
        return Embedding(self.loader.ops, self._model.embedding.matrix, self._model.embedding.shares)

    def read_vocab_size(self) -> int:
        """Return the number of tokens that the head can predict."""
        return self.settings.positive("vocab_size")

    def read_head(self) -> LinearOp:
        """Return the model's output head for own kernels; without a model, the identity."""
        return (lambda x: x) if self._model is None else self.loader.product(self._model.loader.head_matrices, None)

    @classmethod
    def input_layers(cls, config: Mapping[str, Any], count: int) -> tuple[int, ...]:
        """Return the layers whose inputs the head reads; () for the final norm's output.

        Args:
            count: number of layers of the model.
        """
        return ()


class MtpHead(DraftHead, Qwen35):
    """The multi-token prediction of Qwen3.5 and Qwen3-Next."""

    def prepare(self) -> None:
        """Call `Llama.prepare`, then read norms and projections of embedding and state."""
        Llama.prepare(self)
        width = self.settings.hidden
        # The matrix in the checkpoint multiplies the concatenation of embedding and hidden state. One product with each
        # half of its columns needs no concatenation. The first norm of the layer adds the two results.
        self._of_embedding, self._of_state = (
            self.loader.product(*self.loader.matrices({"fc": (RowRange(0, width, width),)}, 2 * width, columns))
            for columns in (RowRange(0, width, 2 * width), RowRange(width, 2 * width, 2 * width))
        )
        self._embedding_norm = self.norm("pre_fc_norm_embedding")
        self._state_norm = self.norm("pre_fc_norm_hidden")

    def hidden(self, batch: Batch, caches: list[Any]) -> Tensor:
        """Return the hidden states of the rows in `batch.sample_rows` (see `Decoder`)."""
        tokens = self._of_embedding(self._embedding_norm(self.embed(batch.tokens)))
        states = self._of_state(self._state_norm(self._inputs[: batch.tokens.shape[0]]))
        hidden = self._norm(*self.blocks[0](tokens, states, caches[0], Step(batch), batch.sample_rows))
        if self.kept is not None:
            self.kept.keep_output(hidden)
        return hidden


class MtpMoeHead(MtpHead, Qwen35Moe):
    """The multi-token prediction of Qwen3.5 with experts."""

    normalized = True


class MtpNextHead(MtpHead, Qwen3Next):
    """The multi-token prediction of Qwen3-Next."""

    normalized = True


MTP_HEADS: dict[str, type[MtpHead]] = {
    "qwen3_5": MtpHead,
    "qwen3_5_moe": MtpMoeHead,
    "qwen3_next": MtpNextHead,
}


class EagleBlock:
    """The layer of an EAGLE-3 head; its attention reads joined embeddings and states.

    Args:
        norms: norms of the token embedding, of the hidden states, and of the input of the feed-forward layer.
    """

    def __init__(
        self, ops: Ops, mixer: Mixer, mlp: Callable[[Tensor], Tensor], norms: tuple[NormOp, NormOp, NormOp]
    ) -> None:
        self._ops = ops
        self.mixer = mixer
        self._mlp = mlp
        self._token_norm, self._state_norm, self._mlp_norm = norms
        self.allocate(0, 0)

    def allocate(self, rows: int, width: int) -> None:
        """Allocate memory for the inputs of at most `rows` rows, of `width` numbers each."""
        # `_inputs` holds all rows of the first input, then all rows of the second input. `_order` lists row 0 of both
        # inputs, then row 1 of both inputs, and so on. Two adjacent rows in this order form one joined row.
        self._inputs = tensors.zeros(2 * rows, width)
        self._rows = tensors.arange(rows, dtype=tensors.int32)
        self._order = tensors.from_numpy(np.arange(2 * rows, dtype=np.int32).reshape(2, rows).T.flatten())

    def __call__(self, tokens: Tensor, states: Tensor, cache: Any, step: Step, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return residual stream and feed-forward output of the rows `rows` (see `Block`).

        Args:
            tokens: [T, hidden], embeddings of T tokens.
            states: [T, hidden], the states from `EagleHead.set_inputs`.
        """
        inputs = self._joined(self._token_norm(tokens), self._state_norm(states))
        delta = self.mixer(inputs, cache, step, rows)
        hidden = self._ops.choose_rows(states, rows)
        return hidden, self._mlp(self._mlp_norm(hidden, delta))

    def _joined(self, first: Tensor, second: Tensor) -> Tensor:
        """Return [rows, 2 * hidden]: each row of `first`, then the row of `second`."""
        count, width = first.shape
        for start, part in ((0, first), (self._rows.shape[0], second)):
            self._ops.choose_rows(part, self._rows[:count], self._inputs[start : start + count])
        return self._ops.choose_rows(self._inputs, self._order[: 2 * count]).view(count, 2 * width)


class EagleHead(DraftHead, Llama):
    """A head of EAGLE-3 for models with layers like those of Llama."""

    supported: ClassVar = {
        **Llama.supported,
        "num_hidden_layers": (1,),
        **dict.fromkeys(_EAGLE_FLAGS, (None, False)),
    }
    # The head uses the embedding of its model. `read_head` reads `d2t`. `t2d` follows from `d2t`.
    unneeded = r"model\.embed_tokens\.weight|d2t|t2d"

    @classmethod
    def input_layers(cls, config: Mapping[str, Any], count: int) -> tuple[int, ...]:
        """Return the indexes of the three layers of the model whose inputs the head reads.

        Raises:
            ModelFileError: the configuration does not name three layers of the model in ascending order.
            UnsupportedModelError: the configuration has a setting that is not supported.
        """
        nested = config.get("eagle_config")
        nested = nested if isinstance(nested, dict) else {}
        if nested.get("use_aux_hidden_state") is False:
            raise UnsupportedModelError("config: 'use_aux_hidden_state' is false, supported: true")
        # `supported` does not cover settings inside `eagle_config`. The check for unread tensors does not find all
        # heads with these settings either, because not every setting adds a tensor.
        for name in _EAGLE_FLAGS & nested.keys():
            if nested[name] not in (None, False):
                raise UnsupportedModelError(f"config: '{name}' is {str(nested[name])[:40]}, supported: false")
        key = "eagle_aux_hidden_state_layer_ids"
        chosen, outputs = config.get(key), nested.get(key)
        if chosen is None and outputs is None:
            chosen = [2, count // 2, count - 3]
        elif chosen is None and isinstance(outputs, list):
            # The numbers in `eagle_config` mean outputs of layers in some heads, and inputs of layers in others. As in
            # SGLang, a list that starts with 1 means outputs, because the first state that heads read is usually the
            # output of layer 1, which is the input of layer 2.
            after = int(outputs[:1] == [1])
            chosen = [layer + after if type(layer) is int else layer for layer in outputs]
        if (
            not isinstance(chosen, list)
            or len(chosen) != _EAGLE_LAYERS
            or not all(type(layer) is int and 0 <= layer < count for layer in chosen)
            or sorted(set(chosen)) != chosen
        ):
            raise ModelFileError(
                f"the head reads the inputs of the layers {str(chosen)[:80]}, but the model has {count} layers; "
                f"expected {_EAGLE_LAYERS} ascending layer numbers from 0 to {count - 1}"
            )
        return tuple(chosen)

    def read_vocab_size(self) -> int:
        """Return the number of tokens that the head can predict."""
        return self.settings.positive("draft_vocab_size", self.settings.positive("vocab_size"))

    def read_head(self) -> LinearOp:
        """Return the output head in the draft checkpoint, and set `targets` from `d2t`.

        If the checkpoint has no head and no `d2t`, return the model's head.

        Raises:
            ModelFileError: the tensor `d2t` maps two tokens to the same token of the model, or one to an unknown id.
        """
        own, total = self.vocab_size, self.settings.positive("vocab_size")
        if own != total or "d2t" in self.loader:
            offsets = self.loader.checkpoint.read("d2t")
            assert isinstance(offsets, Tensor)
            require_shape("d2t", tuple(offsets.shape), (own,))
            # `d2t` has the difference between each token id of the model and the token id of the head.
            self.targets = np.arange(own) + offsets.cpu().numpy().astype(np.int64)
            if not 0 <= self.targets.min() <= self.targets.max() < total or len(np.unique(self.targets)) < own:
                raise ModelFileError(
                    f"tensor d2t must map the {own} tokens of the head to different token ids below {total}"
                )
        if "lm_head.weight" not in self.loader and self.targets is None:
            return super().read_head()
        embedding = Embedding(self.loader.ops, None, self.loader.shares(own))  # `head` uses only the number of tokens
        return self.loader.head("lm_head", embedding, tied=False, inputs=self.settings.hidden)

    def block(self, index: int, prefix: str) -> Any:
        """Return the layer; also read the projection of the model's hidden states."""
        width = self.settings.hidden
        matrices, bias = self.loader.matrices({"fc": (RowRange(0, width, width),)}, _EAGLE_LAYERS * width)
        self._of_states = self.loader.product(matrices, bias)
        token_norm, state_norm, mlp_norm = (
            self.norm(f"{prefix}.{name}") for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        )
        mixer, mlp = self.mixer(index, prefix), self.mlp(index, f"{prefix}.mlp")
        self._layer = EagleBlock(self.loader.ops, mixer, mlp, (token_norm, state_norm, mlp_norm))
        return self._layer

    def mixer(self, index: int, prefix: str) -> Mixer:
        """Return the attention, whose inputs are twice as wide as the hidden size."""
        settings = self.settings
        return Attention(
            self.loader,
            f"{prefix}.self_attn",
            hidden=settings.hidden,
            inputs=2 * settings.hidden,
            heads=settings.heads,
            kv_heads=settings.kv_heads,
            head_dim=settings.head_dim,
            rope=self.rope_of(index),
        )

    def allocate(self, rows: int) -> None:
        """Allocate memory for the inputs of at most `rows` rows."""
        super().allocate(rows)
        self._layer.allocate(rows, self.settings.hidden)

    @tensors.inference_mode()
    def set_inputs(self, states: NDArray[np.float32]) -> None:
        """Set the hidden states of the rows of the next pass.

        Args:
            states: [rows, 3 * hidden] from `KeptStates.read` of the model, or [rows, hidden] from that of the head.
        """
        if states.shape[1] == self.settings.hidden:
            super().set_inputs(states)
        else:
            super().set_inputs(self._of_states(tensors.from_numpy(states)).numpy())

    def hidden(self, batch: Batch, caches: list[Any]) -> Tensor:
        """Return the hidden states of the rows in `batch.sample_rows` (see `Decoder`)."""
        states = self._inputs[: batch.tokens.shape[0]]
        hidden, delta = self._layer(self.embed(batch.tokens), states, caches[0], Step(batch), batch.sample_rows)
        normed = self._norm(hidden, delta)
        if self.kept is not None:
            self.kept.keep_output(hidden)  # not normalized; `_norm` has added `delta` to `hidden`
        return normed


def gives_layer_inputs(architecture: type[Decoder]) -> bool:
    """Return whether EAGLE-3 heads can read the inputs of the layers of a model."""
    # The residual stream must be computed as in Llama. A recurrent model is excluded, because it computes accepted
    # draft tokens again in a later step.
    same = (architecture.hidden is Decoder.hidden, architecture.embed is Decoder.embed)
    layers = issubclass(architecture, Llama) and architecture.block is Llama.block
    plain_norms = architecture.names.block_norms is not None and architecture.names.post_norms is None
    return all(same) and layers and plain_norms and not architecture.recurrent
