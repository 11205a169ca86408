"""A guide: where the output of one sequence stands in its grammar, and what that leaves for its next token."""

from collections.abc import Sequence as Rows

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

Masks = NDArray[np.uint8]
"""[rows, bytes]: one bit per token, the lowest of each byte first; set where the token is allowed."""


class Guide:
    """One sequence's way through a grammar. It follows the output, whatever becomes of what is computed of it.

    Args:
        matcher: at the grammar's beginning; of this guide alone.

    Attributes:
        error: why it cannot go on, empty as long as it can.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.error = ""
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        """The grammar is complete, and nothing may follow."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """Take the output's next token."""
        self._matcher.consume_token(token)
        self._look()

    def forced(self, limit: int) -> tuple[int, ...]:
        """The next tokens, at most `limit`, if the grammar leaves no choice; how text is cut into them is a guess."""
        return self.fitting(tuple(self._matcher.compute_ff_tokens()[:limit]))

    def fitting(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """As many of them as may follow the output."""
        return drafts[: self._matcher.validate_tokens(list(drafts))] if drafts else drafts

    def fill(self, drafts: Rows[int], masks: Masks) -> None:
        """Write masks for the next token and for the one after each draft.

        Args:
            masks: one row more than there are drafts; all bits are set. What follows a draft that the grammar does not
                allow is of no account and left as it is.
        """
        taken = 0
        for draft, mask in zip((*drafts, None), masks, strict=True):
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._look()
            if not self.error and not mask.any():
                self.error = "the grammar leaves no token of the model's vocabulary"
            if self.error:
                mask.fill(0xFF)  # so that no row looks as if it had no numbers
                break
            if draft is None or not self._matcher.try_consume_tokens([draft]):
                break
            taken += 1
            if self._matcher.is_stopped():
                break
        if taken and not self.error:
            self._matcher.rollback(taken)
            self._look()

    def _look(self) -> None:
        if not self.error and self._matcher.is_error():
            self.error = f"the grammar cannot be followed: {said(self._matcher)}"


def said(matcher: LLMatcher) -> str:
    """What is wrong with it, in one line."""
    return matcher.get_error().strip().partition("\n")[0]
