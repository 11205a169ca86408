"""One decoder layer."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from helexa.neuron.layers.loader import Loader
from helexa.neuron.layers.mixer import Mixer
from helexa.neuron.layers.step import Step
from helexa.neuron.ops.norm import NormOp


class Block:
    """A pre-norm decoder layer: a mixer and a feed-forward layer, each with a norm, on the residual stream.

    Args:
        norms: norms of the inputs of the mixer and of the feed-forward layer.
        post_norms: norms of the outputs of the mixer and of the feed-forward layer (Gemma); None for no such norms.
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
        """Add `delta` to the residual stream [T, H] in place; return the stream and the next `delta`.

        The next layer, or the final norm, adds the returned `delta` to the stream.

        Args:
            rows: int32 [S], the rows to compute; None for all.
        """
        delta = self.mixer(self._mixer_norm(hidden, delta), cache, step, rows)
        if rows is not None:
            hidden = self._ops.choose_rows(hidden, rows)
        if self._post_norms is None:
            return hidden, self._mlp(self._mlp_norm(hidden, delta))
        after_mixer, after_mlp = self._post_norms
        return hidden, after_mlp(self._mlp(self._mlp_norm(hidden, after_mixer(delta))))
