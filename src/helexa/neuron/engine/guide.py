"""A guide: where the output of one sequence stands in its grammar, and what that leaves for its next token."""

import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Rows
from contextlib import contextmanager

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

Masks = NDArray[np.uint8]
"""[rows, bytes]: one bit per token, the lowest of each byte first; set where the token is allowed."""

_ROW_SECONDS = 0.02  # that a row's mask may take, again and again: all sequences of a step wait for it
_MOST_SECONDS = 0.5  # beyond that, before the sequence ends


class Guide:
    """One sequence's way through a grammar. It follows the output, whatever becomes of what is computed of it.

    Args:
        matcher: at the grammar's beginning, where it stays.
        clock: seconds that the calling thread has computed.

    Attributes:
        error: why it cannot go on, empty as long as it can.
        ahead: how many of the drafts that `fill` was given last may be kept, however right they are.
    """

    def __init__(self, matcher: LLMatcher, clock: Callable[[], float] = time.thread_time) -> None:
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
        self._taken.append(token)
        with self._measured():
            self._matcher.consume_token(token)
        self._look()

    def forced(self, limit: int) -> tuple[int, ...]:
        """The next tokens, at most `limit`, if the grammar leaves no choice; how text is cut into them is a guess."""
        if not self._looks_ahead:
            return ()
        with self._measured():
            forced = tuple(self._matcher.compute_ff_tokens()[:limit])
            return forced if self._came_back() else ()

    def fitting(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """As many of them as may follow the output."""
        if not drafts or not self._looks_ahead:
            return ()
        with self._measured():
            count = self._matcher.validate_tokens(list(drafts))
            return drafts[:count] if self._came_back() else ()

    def fill(self, drafts: Rows[int], masks: Masks) -> None:
        """Write masks for the next token and for the one after each draft.

        Args:
            masks: one row more than there are drafts; all bits are set. What follows a draft that the grammar does not
                allow, or that may not be kept, is of no account and left as it is.
        """
        with self._measured(len(masks)):
            self._fill(drafts, masks)

    def _fill(self, drafts: Rows[int], masks: Masks) -> None:
        taken = 0
        self.ahead = len(drafts)
        for row, (draft, mask) in enumerate(zip((*drafts, None), masks, strict=True)):
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error() or not mask.any():
                mask.fill(0xFF)  # so that no row looks as if it had no numbers
                self.ahead = max(row - 1, 0)
                if row == 0:
                    self._look()
                    self.error = self.error or "the grammar leaves no token of the model's vocabulary"
                break
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

    @contextmanager
    def _measured(self, rows: int = 0) -> Generator[None]:
        """The time that this takes, for so many masks, is within bounds, or it is the end."""
        begun = self._clock()
        yield
        self._debt = max(self._debt + self._clock() - begun - rows * _ROW_SECONDS, 0.0)
        if self._debt > _MOST_SECONDS and not self.error:
            self.error = "the grammar takes too long to follow"

    def _look(self) -> None:
        if not self.error and self._matcher.is_error():
            self.error = f"the grammar cannot be followed: {said(self._matcher)}"


def said(matcher: LLMatcher) -> str:
    """What is wrong with it, in one line."""
    return matcher.get_error().strip().partition("\n")[0]
