"""A decoder layer: attention or another mixer, and a feed-forward layer."""

from collections.abc import Callable
from typing import Any, Protocol

from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.rope import Rope
from helexa.neuron.ops.batch import Batch
from helexa.neuron.ops.linear_and_norm_operators import NormOp
from helexa.neuron.tensors import Tensor


class Step:
    """Input of all blocks (layers) in a forward pass: batch and rotary tables."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        # float32 [T, N], inputs of the layers besides the residual stream (see `Decoder.layer_inputs`); None for most
        # models
        self.layer_inputs: Tensor | None = None
        self.is_narrow = False  # whether the layers compute only the rows `batch.sample_rows` from now on
        # Layers with the same rotary embedding share its tables.
        self._tables: dict[Rope, tuple[Tensor, Tensor]] = {}

    def tables(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """Return cos and sin of `rope` for the batch's positions (see `Rope.tables`)."""
        if rope not in self._tables:
            self._tables[rope] = rope.tables(self.batch.positions)
        return self._tables[rope]

    def narrow(self, choose_rows: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Limit the following layers to the rows `batch.sample_rows`.

        These layers must not write a cache, and may use only rotary embeddings that earlier layers have used.
        """
        rows, self.is_narrow = self.batch.sample_rows, True
        if self.layer_inputs is not None:
            self.layer_inputs = choose_rows(self.layer_inputs, rows)
        for rope, (cos, sin) in self._tables.items():
            self._tables[rope] = choose_rows(cos, rows), choose_rows(sin, rows)


class Mixer(Protocol):
    """The sublayer that mixes positions: attention or a recurrent layer."""

    # bytes of this layer's KV cache per KV page; 0 for a recurrent layer, and for a layer that reads the KV cache of
    # another layer
    page_bytes: int
    state_bytes: int  # bytes of this layer's recurrent state per sequence, for any sequence length; 0 for attention

    def new_cache(self, pages: int, slots: int) -> Any:
        """Return a KV cache of `pages` pages, or the states of `slots` state slots."""
        ...

    def __call__(self, x: Tensor, cache: Any, step: Step, rows: Tensor | None = None) -> Tensor:
        """Return the outputs for x, [T, H], or [S, H] for only the S rows `rows`.

        T is the number of rows (tokens) of the batch, and H the hidden size. All rows update `cache`, unless it is the
        cache of another layer. `rows` must be `step.batch.sample_rows`. After `Step.narrow`, x has only these rows, and
        `rows` is None.
        """
        ...


class GatedMlp:
    """The gated feed-forward layer `down(act(gate(x)) * up(x))` (Shazeer, 2020).

    Args:
        names: names of the projections gate, up and down.
        fused: name of the single tensor that contains gate and up in some checkpoints.
    """

    def __init__(
        self,
        loader: Loader,
        prefix: str,
        *,
        hidden: int,
        intermediate: int,
        act: str = "silu",
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        fused: str = "gate_up_proj",
    ) -> None:
        gate, up, down = (f"{prefix}.{name}" for name in names)
        shares = loader.input_shares(f"{down}.weight", intermediate)
        # One matrix product computes gate and up, so that the input is read once.
        self._gate_up = loader.fused_linear(f"{prefix}.{fused}", {gate: shares.own, up: shares.own}, hidden)
        self._down = loader.row_parallel_linear(down, hidden, shares, act)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [T, H] for x [T, H] (T rows, H the hidden size)."""
        return self._down(self._gate_up(x))


class SquaredReluMlp:
    """The feed-forward layer `down(relu(up(x)) ** 2)` (So et al., 2021)."""

    def __init__(self, loader: Loader, prefix: str, hidden: int, intermediate: int) -> None:
        self._ops = loader.ops
        shares = loader.input_shares(f"{prefix}.down_proj.weight", intermediate)
        self._up = loader.column_parallel_linear({f"{prefix}.up_proj": shares.own}, hidden)
        self._down = loader.row_parallel_linear(f"{prefix}.down_proj", hidden, shares)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output [T, H] for x [T, H] (T rows, H the hidden size)."""
        return self._down(self._ops.activate(self._up(x), "relu2"))


class WithoutMixing:
    """A feed-forward layer in the place of a mixer: a `Mixer` without a cache."""

    page_bytes = 0
    state_bytes = 0

    def __init__(self, loader: Loader, mlp: Callable[[Tensor], Tensor]) -> None:
        self._ops = loader.ops
        self._mlp = mlp

    def new_cache(self, pages: int, slots: int) -> None:
        """Return None: the layer has no cache."""

    def __call__(self, x: Tensor, cache: None, step: Step, rows: Tensor | None = None) -> Tensor:
        """Return the outputs of the feed-forward layer (see `Mixer`)."""
        return self._mlp(x if rows is None else self._ops.choose_rows(x, rows))


class SublayerBlock:
    """A decoder layer of one sublayer with a norm, as in Nemotron-H."""

    def __init__(self, loader: Loader, mixer: Mixer, norm: NormOp) -> None:
        self._ops = loader.ops
        self.mixer = mixer  # attention, a recurrent layer, or a feed-forward layer in `WithoutMixing`
        self._norm = norm  # norm of the sublayer's input

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, cache: Any, step: Step, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the output of the sublayer (see `Block`)."""
        delta = self.mixer(self._norm(hidden, delta), cache, step, rows)
        return hidden if rows is None else self._ops.choose_rows(hidden, rows), delta


class Block:
    """A pre-norm decoder layer: mixer and feed-forward layer on a residual stream.

    Args:
        norms: norm of the mixer's input, and norm of the feed-forward layer's input.
        post_norms: norms of the outputs of mixer and feed-forward layer, as in Gemma 3; None for no such norms.
    """

    def __init__(
        self,
        loader: Loader,
        mixer: Mixer,
        mlp: Callable[[Tensor], Tensor],
        norms: tuple[NormOp, NormOp],
        post_norms: tuple[NormOp, NormOp] | None = None,
    ) -> None:
        self._ops = loader.ops
        self.mixer = mixer
        self._mlp = mlp
        self._mixer_norm, self._mlp_norm = norms
        self._post_norms = post_norms

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, cache: Any, step: Step, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream, and an output that the next layer adds to it.

        Both are [T, hidden] for the T rows of the batch, or [S, hidden] for the S rows `rows`.

        Args:
            hidden: [T, hidden], residual stream, changed in place.
            delta: [T, hidden], output of the previous layer, which this layer adds to `hidden`; None for the first
                layer.
        """
        # One kernel adds the previous layer's output to the residual stream, and computes the norm.
        delta = self.mixer(self._mixer_norm(hidden, delta), cache, step, rows)
        # The rows are chosen only now, because the mixer updates the cache with all T rows.
        if rows is not None:
            hidden = self._ops.choose_rows(hidden, rows)
        if self._post_norms is None:
            return hidden, self._mlp(self._mlp_norm(hidden, delta))
        after_mixer, after_mlp = self._post_norms
        return hidden, after_mlp(self._mlp(self._mlp_norm(hidden, after_mixer(delta))))
