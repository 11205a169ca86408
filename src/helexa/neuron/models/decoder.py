"""The base class of all decoders: an embedding, blocks, a norm and a head."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from helexa.neuron.layers.block import Block
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.step import Step
from helexa.neuron.models.settings import Settings
from helexa.neuron.ops.batch import Batch
from helexa.neuron.processes import heartbeat


class Decoder:
    """A causal language model; subclasses define the block.

    Args:
        config: configuration of the checkpoint, merged with the class's `defaults`.

    Attributes:
        settings: the checked configuration.
        embedding: token embedding.
        blocks: layers, first to last.
        vocab_size: number of logits per row.
        bos_token: token at the beginning of sequences, or 0.
    """

    recurrent: ClassVar[bool] = False
    """Whether some layers have a recurrent state. Every token changes the state, and changes cannot be undone."""
    capturable: ClassVar[bool] = True
    """Whether steps can be captured as graphs: the operations of a step depend only on the step's shape."""
    half: ClassVar[bool] = True
    """Whether activations stay within the range of float16."""
    norm_offset: ClassVar[float] = 0.0
    """Number to add to the norm weights in checkpoints."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of missing settings, as in transformers' configuration class."""
    supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Settings that change the computation, with their implemented values; None means a missing setting."""

    def __init__(self, config: dict[str, Any], loader: Loader) -> None:
        self.settings = Settings(config)
        # Checkpoint readers that support a quantization remove `quantization_config`.
        self.settings.require(quantization_config=(None,), **self.supported)
        self.loader = loader
        self.prepare()
        self.embedding = loader.embedding("model.embed_tokens", self.settings.hidden)
        self.blocks = [self.block(index, f"model.layers.{index}") for index in range(self.settings.layers)]
        self.vocab_size = self.embedding.vocab_size
        bos = config.get("bos_token_id")
        self.bos_token = bos if type(bos) is int and 0 <= bos < self.vocab_size else 0
        self._norm = self.norm("model.norm")
        tied = config.get("tie_word_embeddings", False) or "lm_head.weight" not in loader
        self._head = loader.head("lm_head", self.embedding, tied, self.settings.hidden)

    def prepare(self) -> None:
        """Check the settings and create objects that all blocks share, before any weight is read."""
        raise NotImplementedError

    def block(self, index: int, prefix: str) -> Block:
        """Return the block at `index`, whose tensor names start with `prefix`."""
        raise NotImplementedError

    def norm(self, name: str) -> Any:
        """Return the norm `name` with the width of the residual stream."""
        return self.loader.norm(name, self.settings.hidden, self.settings.eps, self.norm_offset)

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [T] -> residual stream, float32 [T, H]."""
        return self.embedding(tokens)

    def forward(self, batch: Batch, caches: list[Any]) -> Tensor:
        """Return the logits [S, vocabulary] of the rows that sample; write all rows to the caches."""
        return self.head(self.hidden(batch, caches))

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, H] -> logits [S, vocabulary]."""
        return self._head(hidden)

    def hidden(self, batch: Batch, caches: list[Any]) -> Tensor:
        """Return hidden states [S + P, H] after the last norm.

        The S rows sample; the P rows are pooled or scored.
        """
        step = Step(batch)
        hidden, delta = self.embed(batch.tokens), None
        if batch.embeddings is not None:
            hidden[batch.embedding_rows] = batch.embeddings
        for block, cache in zip(self.blocks[:-1], caches[:-1], strict=True):
            hidden, delta = block(hidden, delta, cache, step)
            heartbeat.beat()
        # The last block caches all rows, but computes outputs only for the sampled and pooled rows.
        hidden, delta = self.blocks[-1](hidden, delta, caches[-1], step, batch.sample_rows)
        return self._norm(hidden, delta)
