"""A decoder layer: attention or another mixer, and a feed-forward layer."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.mixer import Mixer
from helexa.neuron.layers.step import Step
from helexa.neuron.ops.norm import NormOp


class Block:
    """A pre-norm decoder layer, which adds the outputs of a mixer and of a feed-forward layer to the residual stream.

    Args:
        mixer: the sublayer that mixes positions: attention or Gated DeltaNet (see `Mixer`).
        mlp: feed-forward layer.
        norms: norm of the mixer's input, and norm of the feed-forward layer's input.
        post_norms: norm of the mixer's output, and norm of the feed-forward layer's output, as in Gemma 3. None if the
            outputs are not normalized.
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
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer, and return the residual stream and the output of the feed-forward layer.

        The returned residual stream does not yet include the returned output. The caller passes both to the next
        layer or to the final norm, because one kernel can add the output to the residual stream and compute the norm.

        Args:
            hidden: [T, H], residual stream, changed in place: T rows (tokens of the batch), H the hidden size.
            delta: [T, H], output of the previous layer, which this layer adds to `hidden`; None for the first layer.
            cache: KV cache or recurrent state of the mixer. The mixer updates the cache for all T rows.
            step: the batch and its rotary tables.
            rows: int32 [S], indexes of the rows to return; None for all rows.

        Returns:
            Two tensors [T, H], or [S, H] if `rows` is given.
        """
        delta = self.mixer(self._mixer_norm(hidden, delta), cache, step, rows)
        if rows is not None:
            hidden = self._ops.choose_rows(hidden, rows)
        if self._post_norms is None:
            return hidden, self._mlp(self._mlp_norm(hidden, delta))
        after_mixer, after_mlp = self._post_norms
        return hidden, after_mlp(self._mlp(self._mlp_norm(hidden, after_mixer(delta))))
