"""What all decoders have in common: an embedding, blocks, a norm and a head."""

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
    """A causal language model; subclasses say what a block is.

    Args:
        config: the checkpoint's, with the class's `defaults`.

    Attributes:
        settings: what it was built from.
        embedding: of tokens.
        blocks: its layers, first to last.
        vocab_size: width of the logits.
        bos_token: that sequences begin with, or 0.
    """

    recurrent: ClassVar[bool] = False
    """Some layers keep a state beside the pages, which follows every token and cannot go back."""
    recorded: ClassVar[bool] = True
    """What a step computes depends on its shape alone, so that it can be recorded and run again."""
    half: ClassVar[bool] = True
    """Activations stay within float16."""
    norm_offset: ClassVar[float] = 0.0
    """What is added to the weights of norms, as they are in checkpoints."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """What holds where a configuration is silent, as transformers' class for it has it."""
    supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Values that are implemented of settings that change what is computed; None is for a setting that is not there."""

    def __init__(self, config: dict[str, Any], loader: Loader) -> None:
        self.settings = Settings(config)
        # A checkpoint that reads blocks of its own takes `quantization_config` away.
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
        head = {"lm_head": self.vocab_size}
        parts, bias = ([self.embedding.matrix], None) if tied else loader.parts(head, self.settings.hidden)
        self._head = loader.product(parts, bias)

    def prepare(self) -> None:
        """Check the settings and make what all blocks share, before anything is read."""
        raise NotImplementedError

    def block(self, index: int, prefix: str) -> Block:
        """The block at `index`, whose tensors' names begin with `prefix`."""
        raise NotImplementedError

    def norm(self, name: str) -> Any:
        """The norm `name` of the residual stream's width."""
        return self.loader.norm(name, self.settings.hidden, self.settings.eps, self.norm_offset)

    def embed(self, tokens: Tensor) -> Tensor:
        """[T] -> the residual stream, float32 [T, H]."""
        return self.embedding(tokens)

    def forward(self, batch: Batch, caches: list[Any]) -> Tensor:
        """Logits [S, vocabulary] of the rows that sample; each block takes all rows into its cache."""
        return self.head(self.hidden(batch, caches))

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, H] -> logits [S, vocabulary]."""
        return self._head(hidden)

    def hidden(self, batch: Batch, caches: list[Any]) -> Tensor:
        """Hidden states [S + P, H] behind the last norm, of rows that sample and those that are pooled."""
        step = Step(batch)
        hidden, delta = self.embed(batch.tokens), None
        if batch.embeddings is not None:
            hidden[batch.embedding_rows] = batch.embeddings
        for block, cache in zip(self.blocks[:-1], caches[:-1], strict=True):
            hidden, delta = block(hidden, delta, cache, step)
            heartbeat.beat()
        # Of the last block only what it keeps is needed of the other rows.
        hidden, delta = self.blocks[-1](hidden, delta, caches[-1], step, batch.sample_rows)
        return self._norm(hidden, delta)
