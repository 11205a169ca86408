"""Draft heads: layers that predict tokens from hidden states of a model.

A draft head computes a row for each token of a sequence after the first. Its inputs are the embedding of the token, and
the hidden states that the model has computed at the position before. The output is the logits of the next token. To
predict a second token, the head takes its own output in the place of the model's hidden states.

MTP (multi-token prediction, as in DeepSeek-V3, 2024) of Qwen3-Next and Qwen3.5 is a full-attention layer of the model's
kind, on the model's hidden states after its last norm. The checkpoint of the model contains the head. The head uses the
model's token embedding and output head.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.layers.block import Step
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.parallel import Embedding
from helexa.neuron.models.decoder import Decoder
from helexa.neuron.models.llama import Llama
from helexa.neuron.models.qwen import Qwen3Next, Qwen35, Qwen35Moe
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.operators import LinearOp
from helexa.neuron.ops.rank_group import RowRange
from helexa.neuron.tensors import Tensor


class DraftHead(Decoder):
    """A mixin for decoders that predict tokens from the hidden states of a model.

    Args:
        model: the model; None to build the head without weights, for a memory estimate.
    """

    def __init__(self, config: dict[str, Any], loader: Loader, model: Decoder | None = None) -> None:
        self._model = model
        super().__init__(config, loader)
        self._inputs = tensors.zeros(0, self.settings.hidden)

    def allocate(self, rows: int) -> None:
        """Allocate memory for the hidden states of at most `rows` rows."""
        # Captured graphs read the hidden states at a fixed address.
        self._inputs = tensors.zeros(rows, self.settings.hidden, device=self.loader.ops.device)

    @tensors.inference_mode()
    def set_inputs(self, states: NDArray[np.float32]) -> None:
        """Set the hidden states of the rows of the next pass, [T, H]."""
        self._inputs[: len(states)].copy_(tensors.from_numpy(states))

    def read_embedding(self) -> Embedding:
        """Return the token embedding of the model, for the kernels of this head."""
        if self._model is None:
            return Embedding(self.loader.ops, None, self.loader.shares(self.settings.positive("vocab_size")))
        return Embedding(self.loader.ops, self._model.embedding.matrix, self._model.embedding.shares)

    def read_vocab_size(self) -> int:
        """Return the number of tokens that the head can predict."""
        return self.settings.positive("vocab_size")

    def read_head(self) -> LinearOp:
        """Return the output head of the model, for the kernels of this head."""
        return (lambda x: x) if self._model is None else self.loader.product(self._model.loader.head_matrices, None)


class MtpHead(DraftHead, Qwen35):
    """The multi-token prediction of Qwen3.5 and Qwen3-Next."""

    def prepare(self) -> None:
        """Read the projection of both inputs and their norms, after `Llama.prepare`."""
        Llama.prepare(self)
        width = self.settings.hidden
        # A product for each half of the columns needs no concatenation of the inputs. The first norm of the layer adds
        # both results.
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
            self.kept.keep(hidden)
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
