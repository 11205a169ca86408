"""The base class of all models: a token embedding, decoder layers, a final norm and an output head."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from helexa.neuron.layers.block import Block
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.step import Step
from helexa.neuron.models.settings import NEUTRAL, Settings
from helexa.neuron.ops.batch import Batch
from helexa.neuron.processes import heartbeat


class Decoder:
    """A causal language model. Subclasses define the decoder layers with the methods `prepare` and `block`.

    Args:
        config: configuration of the checkpoint. For missing settings, the caller has added the values in `defaults`.
        loader: object that reads the weights and prepares them for the kernels.

    Attributes:
        settings: the checked configuration.
        embedding: token embedding. Only stage 0 of a pipeline has it (see `Stage`).
        blocks: decoder layers of this stage, first to last.
        vocab_size: number of logits per row.
        bos_token: token at the beginning of sequences; 0 if the configuration has no valid `bos_token_id`.
    """

    recurrent: ClassVar[bool] = False
    """Whether some layers have a recurrent state, which every token changes and which cannot be rewound."""
    capturable: ClassVar[bool] = True
    """Whether any kernels may capture a step as a graph and replay it, because its operations depend only on its shape.

    If False, only kernels with `Ops.captures_state` capture steps.
    """
    half: ClassVar[bool] = True
    """Whether activations stay within the range of float16, so that the model can run in float16."""
    norm_offset: ClassVar[float] = 0.0
    """Number to add to the norm weights in checkpoints, which some models store minus 1."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default values of settings that `config.json` lacks, as in the configuration class of transformers."""
    supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Implemented values of settings that change the computation. The value None stands for a missing setting."""

    def __init__(self, config: dict[str, Any], loader: Loader) -> None:
        self.settings = Settings(config)
        self.settings.require(**{**NEUTRAL, **self.supported})
        self.loader = loader
        self.prepare()
        self._layers = loader.stage.layers(self.settings.layers)
        if loader.stage.is_first:
            self.embedding = loader.embedding("model.embed_tokens", self.settings.hidden)
        self.blocks = [self.block(index, f"model.layers.{index}") for index in self._layers]
        self.vocab_size = loader.vocab_size("model.embed_tokens")
        bos = config.get("bos_token_id")
        self.bos_token = bos if type(bos) is int and 0 <= bos < self.vocab_size else 0
        if loader.stage.is_first:
            self._norm = self.norm("model.norm")
            tied = config.get("tie_word_embeddings", False) or "lm_head.weight" not in loader
            suppressed = self.settings.token_ids("suppress_tokens", self.vocab_size)
            self._head = loader.head("lm_head", self.embedding, tied, self.settings.hidden, suppressed)

    def prepare(self) -> None:
        """Check the settings, and create the objects that all decoder layers share, such as rotary embeddings.

        The constructor calls this method before it reads the embedding and the decoder layers.
        """
        raise NotImplementedError

    def block(self, index: int, prefix: str) -> Block:
        """Read and return the decoder layer `index`. The names of its tensors start with `prefix`."""
        raise NotImplementedError

    def norm(self, name: str) -> Any:
        """Read and return the RMS norm with the tensor `name.weight`, for inputs of the hidden size."""
        return self.loader.norm(name, self.settings.hidden, self.settings.eps, self.norm_offset)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first layer, float32 [T, H], for T token ids `tokens` (H is the hidden size)."""
        return self.embedding(tokens)

    def forward(self, batch: Batch, caches: list[Any]) -> Tensor:
        """Run the model on a batch, and return the logits [S, vocabulary] of the S rows in `batch.sample_rows`.

        Args:
            batch: the tokens of one forward pass.
            caches: KV cache or recurrent states of each layer. The layers update the caches with all rows of the batch.
        """
        return self.head(self.hidden(batch, caches))

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, vocabulary] of S hidden states [S, H], which the final norm has normalized.

        Later stages of a pipeline have no output head and return `hidden`.
        """
        return self._head(hidden) if self.loader.stage.is_first else hidden

    def hidden(self, batch: Batch, caches: list[Any]) -> Tensor:
        """Run all layers and the final norm, and return the hidden states of the rows in `batch.sample_rows`.

        In a pipeline, each stage runs its own layers, and only stage 0 returns these hidden states.

        Args:
            batch: the tokens of one forward pass.
            caches: KV cache or recurrent states of each layer. The layers update the caches with all rows of the batch.

        Returns:
            [S + P, H], with H the hidden size. The first S rows are used to sample tokens. The last P rows are used for
            embeddings or prompt scores.
        """
        step, stage = Step(batch), self.loader.stage
        delta: Tensor | None = None
        if stage.is_first:
            hidden = self.embed(batch.tokens)
            if batch.embeddings is not None:
                hidden[batch.embedding_rows] = batch.embeddings
        else:
            hidden = stage.receive(self.loader.ops, batch.tokens.shape[0], self.settings.hidden)
        for index, block, cache in zip(self._layers, self.blocks, caches, strict=True):
            # The last layer caches all rows, but computes outputs only for the sampled and pooled rows.
            rows = batch.sample_rows if index + 1 == self.settings.layers else None
            hidden, delta = block(hidden, delta, cache, step, rows)
            if batch.deepstack is not None and index < len(batch.deepstack):
                delta[batch.embedding_rows] += batch.deepstack[index]
            heartbeat.beat()
        if stage.is_whole_model:
            return self._norm(hidden, delta)
        total = hidden if delta is None else hidden + delta
        hidden = stage.send(self.loader.ops, total, batch.sample_rows.shape[0])
        return self._norm(hidden) if stage.is_first else hidden
