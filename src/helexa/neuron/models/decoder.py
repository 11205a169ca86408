"""The base class of all models: embedding, layers, final norm, output head."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from helexa.core.errors import ModelFileError
from helexa.neuron import tensors
from helexa.neuron.layers.block import Block, Step, SublayerBlock
from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.parallel import Embedding
from helexa.neuron.models.settings import NEUTRAL, Settings, TensorNames
from helexa.neuron.ops.batch import AttentionShape, Batch
from helexa.neuron.ops.interface import Ops
from helexa.neuron.ops.linear_and_norm_operators import LinearOp
from helexa.neuron.processes import heartbeat
from helexa.neuron.tensors import Tensor


class KeptStates:
    """Copies of hidden states of the last pass, for a draft head.

    The copies have one row for each row in `Batch.sample_rows`. Their memory is allocated once, because captured graphs
    write to a fixed address.

    Args:
        rows: maximum number of rows.
        width: hidden size.
        layers: indexes of the layers whose inputs are kept, without duplicates; empty to keep the output of the final
            norm instead.
    """

    def __init__(self, ops: Ops, rows: int, width: int, layers: Sequence[int] = ()) -> None:
        self._ops = ops
        self._layers = tuple(layers)
        self._states = [tensors.zeros(rows, width, device=ops.device) for _ in self._layers or (None,)]
        self._rows = tensors.arange(rows, dtype=tensors.int32, device=ops.device)

    def keep_input(self, layer: int, hidden: Tensor, delta: Tensor | None, rows: Tensor) -> None:
        """Copy rows of the input of layer `layer`, if the draft head reads this input.

        Args:
            hidden: [T, hidden], the residual stream of T rows.
            delta: [T, hidden], output of the previous layer, not yet added to `hidden`; None for the first layer.
            rows: indexes of the rows to copy.
        """
        if layer not in self._layers or not rows.shape[0]:
            return
        chosen = self._ops.choose_rows(hidden, rows)
        if delta is not None:
            chosen = self._ops.add(chosen, self._ops.choose_rows(delta, rows))
        self._copy(chosen, self._layers.index(layer))

    def keep_output(self, hidden: Tensor) -> None:
        """Copy all rows of the model's output, if no inputs of layers are kept."""
        if not self._layers and hidden.shape[0]:
            self._copy(hidden, 0)

    def _copy(self, hidden: Tensor, part: int) -> None:
        rows = hidden.shape[0]
        self._ops.choose_rows(hidden, self._rows[:rows], self._states[part][:rows])

    def read(self, rows: int) -> NDArray[np.float32]:
        """Return copied states of the first `rows` rows, float32 [rows, states * width].

        A row has one state, or with `layers`, the states of these layers in the order of `layers`.
        """
        return np.concatenate([states[:rows].cpu().numpy() for states in self._states], axis=1)


class Decoder:
    """A causal language model. Subclasses define its layers (`prepare`, `block`).

    Args:
        config: configuration from `standard_config`.
        loader: object that reads the weights and prepares them for the kernels.

    Attributes:
        settings: the checked configuration.
        embedding: token embedding. Only stage 0 of a pipeline has it (see `Stage`).
        blocks: decoder layers of this stage, first to last.
        vocab_size: number of logits per row.
        bos_token: token at the beginning of sequences; 0 if the configuration has no valid `bos_token_id`.
        kept: copies of hidden states for a draft head; None without a draft head.

    Raises:
        ModelFileError: a setting or a tensor is missing, invalid, or not supported (subclass UnsupportedModelError).
    """

    # Whether some layers have a recurrent state, which every token changes and which cannot be rewound.
    recurrent: ClassVar[bool] = False
    # Whether every kernel backend may capture a step as a graph and replay the graph. This requires that the operations
    # of a step depend only on the shape of the batch. If False, only backends with `Ops.captures_state` capture steps.
    capturable: ClassVar[bool] = True
    # Whether activations stay within the range of float16, so that the model can run in float16.
    half: ClassVar[bool] = True
    sinks: ClassVar[bool] = False  # Whether each attention head has an attention sink (see `Attention`)
    # Number to add to the norm weights in checkpoints, which some models store minus 1.
    norm_offset: ClassVar[float] = 0.0
    # Default values of settings that `config.json` lacks, as in the configuration class of transformers.
    defaults: ClassVar[Mapping[str, Any]] = {}
    # Implemented values of settings that change the computation. The value None stands for a missing setting.
    supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    # Settings in `NEUTRAL` that this architecture implements, so that `NEUTRAL` does not limit their values.
    implemented: ClassVar[Collection[str]] = ()
    # Regular expression of tensors that checkpoints of the architecture contain, but that the model does not need. All
    # other tensors that the model does not read are an error. `prepare` may set an expression that depends on the
    # settings.
    unneeded: str = r"(?!)"
    names: ClassVar[TensorNames] = TensorNames()  # Names of the tensors in checkpoints of this architecture

    kept: KeptStates | None = None

    def __init_subclass__(cls) -> None:
        """Check that no two base classes, such as model and mixin, set the same attribute.

        Raises:
            TypeError: two unrelated base classes set the same attribute (no method or property), and the class itself
                does not.
        """
        # Python would silently use the value of the first base class.
        super().__init_subclass__()
        names = {name for base in cls.__bases__ for owner in base.__mro__ for name in vars(owner)} - vars(cls).keys()
        for name in names if len(cls.__bases__) > 1 else ():
            first, *others = (owner for owner in cls.__mro__ if name in vars(owner))
            value = vars(first)[name]
            if name.startswith("__") or callable(value) or isinstance(value, classmethod | property):
                continue
            if clash := [owner.__name__ for owner in others if not issubclass(first, owner)]:
                owners = f"{first.__name__} and {', '.join(clash)}"
                raise TypeError(f"{cls.__name__} must set '{name}', because {owners} both set it")

    @classmethod
    def standard_config(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `config` with the values of `defaults` for missing settings.

        If the configurations of a subclass use other keys, the subclass also returns the keys that `Settings` and
        `NativeOps` read.
        """
        return {**cls.defaults, **config}

    def __init__(self, config: dict[str, Any], loader: Loader) -> None:
        self.settings = Settings(config)
        neutral = {key: values for key, values in NEUTRAL.items() if key not in self.implemented}
        self.settings.require(**{**neutral, **self.supported})
        self.loader = loader
        self.prepare()
        self._layers = loader.stage.layers(self.settings.layers)
        if loader.stage.is_first:
            self.embedding = self.read_embedding()
        self.blocks = [self.block(index, f"model.layers.{index}") for index in self._layers]
        layers = range(self.settings.layers)
        self._last_cached = max(index for index in layers if self.cache_layer(index) == index)
        self.vocab_size = self.read_vocab_size()
        bos = config.get("bos_token_id")
        self.bos_token = bos if type(bos) is int and 0 <= bos < self.vocab_size else 0
        if loader.stage.is_first:
            self._norm = self.norm(self.names.norm)
            self._head = self.read_head()

    def read_embedding(self) -> Embedding:
        """Read and return the token embedding."""
        return self.loader.embedding(self.names.embedding, self.settings.hidden)

    def read_vocab_size(self) -> int:
        """Return the number of logits per row from the header of the checkpoint."""
        return self.loader.vocab_size(self.names.embedding)

    def read_head(self) -> LinearOp:
        """Read and return the output head; a tied head has the embedding's weight.

        Raises:
            ModelFileError: the checkpoint has no output head, and the configuration says that it has one.
        """
        tied = self.settings.config.get("tie_word_embeddings")
        # If the embedding replaced the missing output head, the model would answer nonsense.
        if tied is False and "lm_head.weight" not in self.loader:
            raise ModelFileError(
                "config: 'tie_word_embeddings' is false, but the tensor lm_head.weight is missing",
                advice="set 'tie_word_embeddings' to true in config.json, or download the model again",
            )
        tied = tied or "lm_head.weight" not in self.loader
        suppressed = self.settings.token_ids("suppress_tokens", self.vocab_size)
        cap = self.settings.soft_cap("final_logit_softcapping")
        return self.loader.head("lm_head", self.embedding, tied, self.settings.hidden, suppressed, cap)

    def prepare(self) -> None:
        """Check the settings, and create the objects that all layers share.

        The constructor calls this method before it reads the embedding and the decoder layers.
        """
        raise NotImplementedError

    def window(self, index: int) -> int | None:
        """Return the sliding window of layer `index` in positions; None without one."""
        return None

    def windows(self) -> list[int | None]:
        """Return the sliding window of each layer of this stage (see `window`)."""
        return [self.window(index) for index in self._layers]

    def attention_shapes(self) -> tuple[AttentionShape, ...]:
        """Return the shapes of the attention layers, without duplicates."""
        settings = self.settings
        return (AttentionShape(settings.heads, settings.kv_heads, settings.head_dim),)

    def cache_layer(self, index: int) -> int:
        """Return the index of the layer whose KV cache the layer `index` reads."""
        return index

    def new_caches(self, pages: int, slots: int, window_pages: int | None = None) -> list[Any]:
        """Return the cache of each layer of this stage (see `Mixer.new_cache`).

        Layers that share a cache have the same object in the list (see `cache_layer`).

        Args:
            window_pages: number of pages of the layers with a sliding window; None for `pages`.
        """
        caches: dict[int, Any] = {}
        for index, block in zip(self._layers, self.blocks, strict=True):
            source = self.cache_layer(index)
            own_pages = pages if window_pages is None or self.window(index) is None else window_pages
            caches[index] = block.mixer.new_cache(own_pages, slots) if source == index else caches[source]
        return list(caches.values())

    def block(self, index: int, prefix: str) -> Block | SublayerBlock:
        """Read and return decoder layer `index`, whose tensor names start with `prefix`."""
        raise NotImplementedError

    def norm(self, name: str) -> Any:
        """Return the RMS norm `name.weight` of inputs of the hidden size."""
        return self.loader.norm(name, self.settings.hidden, self.settings.eps, self.norm_offset)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first layer, float32 [T, hidden], for T `tokens`."""
        return self.embedding(tokens)

    def layer_inputs(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        """Return inputs of the layers besides the residual stream; None if there are none.

        Args:
            hidden: float32 [rows, hidden], the input of the first layer.
        """
        return None

    def forward(self, batch: Batch, caches: list[Any]) -> Tensor:
        """Return `head` of `hidden`: in stage 0, the logits of `batch.sample_rows`."""
        return self.head(self.hidden(batch, caches))

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [S, vocabulary] of S normalized hidden states [S, hidden].

        Later stages of a pipeline have no output head, and return `hidden`.
        """
        # Later stages of a pipeline have no output head, so they return the hidden states unchanged.
        return self._head(hidden) if self.loader.stage.is_first else hidden

    def hidden(self, batch: Batch, caches: list[Any]) -> Tensor:
        """Return the normalized hidden states of `batch.sample_rows`, [S + P, hidden].

        The first S rows are used to sample tokens, the last P rows for embeddings or prompt scores. In a pipeline, each
        stage runs its own layers. Only stage 0 returns these hidden states, after it has waited for the last stage. The
        other stages return the output of their last layer, not normalized.

        Args:
            caches: KV cache or recurrent states of each layer. The layers update the caches with all rows of the batch.
        """
        step, stage = Step(batch), self.loader.stage
        delta: Tensor | None = None
        if stage.is_first:
            hidden = self.embed(batch.tokens)
            if batch.embeddings is not None:
                hidden[batch.embedding_rows] = batch.embeddings
            step.layer_inputs = self.layer_inputs(batch, hidden)
        else:
            hidden = stage.receive(self.loader.ops, batch.tokens.shape[0], self.settings.hidden)
        # After the last layer that has its own cache, only the rows in `sample_rows` are needed. This layer stores the
        # keys and values of all rows, but it and all later layers compute outputs only for these rows.
        last = self._last_cached if batch.has_unneeded_rows else self.settings.layers - 1
        for index, block, cache in zip(self._layers, self.blocks, caches, strict=True):
            if self.kept is not None:
                self.kept.keep_input(index, hidden, delta, batch.sample_rows)
            rows = batch.sample_rows if index == last else None
            hidden, delta = block(hidden, delta, cache, step, rows)
            if rows is not None and index + 1 < self.settings.layers:
                if not rows.shape[0]:
                    break  # no row is sampled: the step only fills the cache
                step.narrow(self.loader.ops.choose_rows)
            if batch.deepstack is not None and delta is not None and index < len(batch.deepstack):
                # DeepStack: the first layers also add hidden states of the vision tower.
                delta[batch.embedding_rows] += batch.deepstack[index]
            heartbeat.beat()
        if stage.is_whole_model:
            hidden = self._norm(hidden, delta)
            if self.kept is not None:
                self.kept.keep_output(hidden)
            return hidden
        total = hidden if delta is None else hidden + delta
        hidden = stage.send(self.loader.ops, total, batch.sample_rows.shape[0])
        return self._norm(hidden) if stage.is_first else hidden
