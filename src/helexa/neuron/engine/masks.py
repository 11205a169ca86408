"""The masks of a step: which tokens grammars leave to its rows, computed beside it in a thread of its own."""

from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from helexa.neuron.engine import guide
from helexa.neuron.engine.guide import Guide
from helexa.neuron.engine.sampler import Restrict
from helexa.neuron.engine.scheduler import Plan


class MaskThread:
    """Computes masks while the model computes logits.

    Args:
        vocabulary: how many logits a row has.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._vocabulary = vocabulary
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._penalties = torch.from_numpy(np.where(bits, 0.0, -np.inf).astype(np.float32)).to(device)

    @contextmanager
    def beside(self, plan: Plan) -> Generator[Restrict | None]:
        """While a step of this plan runs: what takes from its logits the tokens that no grammar allows.

        The sequences' guides belong to the thread until the block is left.
        """
        work: list[tuple[Guide, tuple[int, ...], int]] = []
        rows: list[int] = []
        row = 0
        for entry in plan:
            count = len(entry.drafts) + 1 if entry.samples else 0
            if count and entry.sequence.guide is not None:
                work.append((entry.sequence.guide, entry.drafts, len(rows)))
                rows += range(row, row + count)
            row += count
        if not work:
            yield None
            return
        masks = np.full((len(rows), -(-self._vocabulary // 32) * 4), 0xFF, dtype=np.uint8)
        filled = self._thread.submit(_fill, work, masks)
        try:
            yield lambda logits: self._restrict(logits, rows, filled)
        finally:
            filled.result()

    def _restrict(self, logits: Tensor, rows: list[int], filled: "Future[guide.Masks]") -> None:
        """Add -inf to the logits [S, vocabulary], float32, of tokens that are not allowed in `rows`."""
        masks = torch.from_numpy(filled.result()).to(logits.device)
        penalties = self._penalties.index_select(0, masks.view(-1).int()).view(len(rows), -1)
        logits.index_add_(0, torch.tensor(rows, device=logits.device), penalties[:, : self._vocabulary])


def _fill(work: list[tuple[Guide, tuple[int, ...], int]], masks: guide.Masks) -> guide.Masks:
    for one, drafts, first in work:
        one.fill(drafts, masks[first : first + len(drafts) + 1])
    return masks
