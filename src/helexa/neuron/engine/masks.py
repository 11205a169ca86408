"""The masks of a step: which tokens grammars leave to its rows, computed beside it in a thread of its own."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from helexa.neuron.engine.guide import Guide, Masks
from helexa.neuron.engine.plan import Plan
from helexa.neuron.engine.sampler import Restrict


@dataclass(frozen=True)
class Restriction:
    """What masks leave of logits [S, vocabulary]: of some rows nothing but `kept`, of others all but `barred`.

    Most masks leave a few tokens, or nearly all: so little is touched.

    Attributes:
        rows: of which little is left.
        kept, barred: places in all rows laid end to end.
    """

    rows: list[int]
    kept: Tensor
    barred: Tensor

    def apply(self, logits: Tensor) -> None:
        """Make -inf of the others."""
        kept, barred = self.kept.to(logits.device), self.barred.to(logits.device)
        flat = logits.view(-1)
        values = flat.index_select(0, kept)
        for row in self.rows:  # on a CPU several times quicker than all at once
            logits[row].fill_(-torch.inf)
        flat.index_copy_(0, kept, values)
        flat.index_fill_(0, barred, -torch.inf)


class MaskThread:
    """Computes masks while the model computes logits.

    Args:
        vocabulary: how many logits a row has.
    """

    def __init__(self, vocabulary: int) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        self._vocabulary = vocabulary

    @contextmanager
    def beside(self, plan: Plan) -> Generator[Restrict | None]:
        """While a step of this plan runs: what takes from its logits the tokens that no grammar allows.

        The sequences' guides belong to the thread until the block is left.
        """
        guides: list[tuple[Guide, tuple[int, ...]]] = []
        rows: list[int] = []
        row = 0
        for entry in plan:
            count = len(entry.drafts) + 1 if entry.samples else 0
            if count and entry.sequence.guide is not None:
                guides.append((entry.sequence.guide, entry.drafts))
                rows += range(row, row + count)
            row += count
        if not guides:
            yield None
            return
        found = self._thread.submit(self._find, guides, rows)
        try:
            yield lambda logits: found.result().apply(logits)
        finally:
            found.result()

    def _find(self, guides: list[tuple[Guide, tuple[int, ...]]], rows: list[int]) -> Restriction:
        """What the guides leave of `rows`, which are one for each of them and one more per draft."""
        masks: Masks = np.full((len(rows), -(-self._vocabulary // 32) * 4), 0xFF, dtype=np.uint8)
        first = 0
        for guide, drafts in guides:
            guide.fill(drafts, masks[first : first + len(drafts) + 1])
            first += len(drafts) + 1
        strict = np.array([np.count_nonzero(mask) < np.count_nonzero(~mask) for mask in masks])
        masks[~strict] ^= 0xFF
        places = np.flatnonzero(masks != 0)  # many times quicker than without the comparison
        place, bit = np.unpackbits(masks.reshape(-1, 1)[places], axis=1, bitorder="little").nonzero()
        mask, byte = np.divmod(places[place], masks.shape[1])
        row, token = np.array(rows)[mask], byte * 8 + bit
        flat, real, kept = row * self._vocabulary + token, token < self._vocabulary, strict[mask]
        return Restriction(
            rows=[row for row, alone in zip(rows, strict, strict=True) if alone],
            kept=torch.from_numpy(flat[real & kept]),
            barred=torch.from_numpy(flat[real & ~kept]),
        )
