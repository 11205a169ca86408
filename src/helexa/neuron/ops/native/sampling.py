"""Sampling and log-probabilities by native kernels."""

import numpy as np
from numpy.typing import NDArray

from helexa.neuron import tensors
from helexa.neuron.ops.native.launcher import Launcher
from helexa.neuron.ops.sampling import Masks, Sampling
from helexa.neuron.tensors import Tensor


def sample(
    launcher: Launcher, logits: Tensor, sampling: Sampling, last: Tensor | None, masks: Masks | None = None
) -> Tensor:
    """Sample a token (int64) for each row, or for each row in `masks`, in its order."""
    adjustments, count = sampling.adjustments, logits.shape[0] if masks is None else len(masks)
    adjusted = len(adjustments.tokens) > 0
    # `out` does not belong to the workspace, because the graph of the next step, which overwrites the workspace,
    # may run before the engine reads these tokens.
    out = tensors.empty(count, dtype=tensors.int64)
    stacked = None if masks is None else np.stack(list(masks.values()))
    launcher.launch(
        "choose_tokens",
        x=logits.float(),
        filters=tensors.from_numpy(sampling.filters),
        seeds=tensors.from_numpy(sampling.seeds.view(np.int64)),
        positions=tensors.from_numpy(sampling.positions),
        starts=tensors.from_numpy(adjustments.starts) if adjusted else None,
        tokens=tensors.from_numpy(adjustments.tokens) if adjusted else None,
        values=tensors.from_numpy(adjustments.values) if adjusted else None,
        last=last,
        chosen=None if masks is None else tensors.from_numpy(np.array(list(masks), np.int32)),
        masks=None if stacked is None else tensors.from_numpy(stacked),
        out=out,
        rows=count,
        samples=logits.shape[0],
        width=logits.shape[1],
        mask_bytes=0 if stacked is None else stacked.shape[1],
        last_count=0 if last is None else last.shape[0],
    )
    return out


def log_probabilities(
    launcher: Launcher, logits: Tensor, tokens: Tensor, alternatives: int, rows: NDArray[np.int32] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, with native kernels (see `Ops.log_probabilities`)."""
    width = logits.shape[1]
    count, likeliest = logits.shape[0] if rows is None else len(rows), min(alternatives, width)
    out, values = tensors.empty(count), tensors.empty(count, likeliest)
    ids = tensors.empty(count, likeliest, dtype=tensors.int64)
    launcher.launch(
        "log_probabilities",
        x=logits.float(),
        tokens=tokens,
        chosen=None if rows is None else tensors.from_numpy(rows),
        out=out,
        ids=ids,
        values=values,
        rows=count,
        width=width,
        likeliest=likeliest,
    )
    return out, ids, values
