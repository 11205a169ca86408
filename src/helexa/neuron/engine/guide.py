"""A guide: where the output of one sequence stands in its grammar, and what that leaves for its next token."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.uint8]
"""[bytes]: one bit per token, the lowest of each byte first; set where the token is allowed."""

_ROW_SECONDS = 0.02  # that a look at a row may take, again and again: all sequences of a step wait for it
_MOST_SECONDS = 0.5  # beyond that, before the sequence ends


class Guide:
    """One sequence's way through a grammar. It follows the output, whatever becomes of what is computed of it.

    Args:
        matcher: at the grammar's beginning, where it stays.
        clock: seconds that the calling thread has computed.

    Attributes:
        error: why it cannot go on, empty as long as it can.
        ahead: how many of the drafts that `refused` was given last may be kept, however right they are.
    """

    def __init__(self, matcher: "LLMatcher", clock: Callable[[], float] = time.thread_time) -> None:
        self.error = ""
        self.ahead = 0
        self._beginning = matcher
        self._matcher = matcher.deep_copy()
        self._taken: list[int] = []
        self._looks_ahead = True
        self._clock = clock
        self._debt = 0.0

    @property
    def ended(self) -> bool:
        """The grammar is complete, and nothing may follow."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """Take the output's next token."""
        begun = self._clock()
        self._taken.append(token)
        self._matcher.consume_token(token)
        self._spent(begun)
        self._look()

    def forced(self, limit: int) -> tuple[int, ...]:
        """The next tokens, at most `limit`, if the grammar leaves no choice; how text is cut into them is a guess."""
        if not self._looks_ahead:
            return ()
        begun = self._clock()
        forced = tuple(self._matcher.compute_ff_tokens()[:limit])
        sound = self._came_back()
        self._spent(begun)
        return forced if sound else ()

    def fitting(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """As many of them as may follow the output."""
        if not drafts or not self._looks_ahead:
            return ()
        begun = self._clock()
        count = self._matcher.validate_tokens(list(drafts))
        sound = self._came_back()
        self._spent(begun)
        return drafts[:count] if sound else ()

    def refused(self, chosen: Rows[int], drafts: Rows[int]) -> dict[int, Mask]:
        """What may be chosen where it is none of `chosen`.

        Args:
            chosen: for the output's next token and for the one after each draft; negative is none.
            drafts: which may come next.

        Returns:
            Masks, by their places in `chosen`. What follows a draft that is not chosen, not allowed or not to be kept
            is of no account and not looked at.
        """
        begun = self._clock()
        self.ahead = len(drafts)
        plainly = not drafts and chosen[0] >= 0 and self._allows(chosen[0])  # as nearly always
        masks = {} if plainly else self._refused(chosen, drafts)
        self._spent(begun, len(chosen))
        return masks

    def _refused(self, chosen: Rows[int], drafts: Rows[int]) -> dict[int, Mask]:
        masks: dict[int, Mask] = {}
        taken = 0
        for row, (token, draft) in enumerate(zip(chosen, (*drafts, None), strict=True)):
            if token < 0:
                break
            if self._allows(token):
                if draft is None or token != draft:
                    break
            else:
                mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
                if self._matcher.is_error() or not mask.any():
                    self.ahead = max(row - 1, 0)
                    if row == 0:
                        self._look()
                        self.error = self.error or "the grammar leaves no token of the model's vocabulary"
                    break
                if not mask[token >> 3] >> (token & 7) & 1:
                    masks[row] = mask
                if draft is None:
                    break
            if not self._matcher.try_consume_tokens([draft]):
                if self._matcher.is_error():
                    self.ahead = row
                break
            taken += 1
            if self._matcher.is_stopped():
                break
        if not self.error:
            self._came_back(taken)
        return masks

    def _allows(self, token: int) -> bool:
        """Whether it may come next. A special token that may is sometimes denied here; a mask has it."""
        forced = self._matcher.compute_ff_tokens()
        return forced[0] == token if forced else self._matcher.validate_tokens([token]) == 1

    def _came_back(self, taken: int = 0) -> bool:
        """Go back to the output's end after a look ahead of it; False if that came to grief.

        An error there is none of the output, which may go another way: the matcher, which keeps an error for ever, is
        replaced, and does not look ahead any more.
        """
        if not self._matcher.is_error() and (not taken or self._matcher.rollback(taken)):
            return True
        self._looks_ahead = False
        self._matcher = self._beginning.deep_copy()
        self._matcher.consume_tokens(self._taken)
        self._look()
        return False

    def _spent(self, begun: float, rows: int = 0) -> None:
        """The time since then, for so many rows, is within bounds, or it is the end."""
        self._debt = max(self._debt + self._clock() - begun - rows * _ROW_SECONDS, 0.0)
        if self._debt > _MOST_SECONDS and not self.error:
            self.error = "the grammar takes too long to follow"

    def _look(self) -> None:
        if not self.error and self._matcher.is_error():
            self.error = f"the grammar cannot be followed: {said(self._matcher)}"


def said(matcher: "LLMatcher") -> str:
    """What is wrong with it, in one line."""
    return matcher.get_error().strip().partition("\n")[0]
