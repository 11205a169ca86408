"""The grammar matcher of one sequence: consumes output tokens, and finds the tokens that are allowed next."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.uint8]
"""Allowed tokens, one bit per token id: bit t % 8 of byte t // 8 is 1 if token t is allowed."""

_ROW_SECONDS = 0.02  # CPU seconds allowed per checked row, because all sequences of a step wait for the check
_MOST_SECONDS = 0.5  # CPU seconds beyond the allowed time after which the sequence ends with an error
_NO_TOKEN = "leaves no token of the model's vocabulary"


class GrammarMatcher:
    """Matches the output of one sequence with its grammar, by means of llguidance's `LLMatcher`.

    The matcher consumes only output tokens. Drafts are consumed by a copy of the matcher. `LLMatcher.rollback` is not
    used: if a special token was consumed, it returns True but leaves the matcher in a wrong state.

    Args:
        matcher: an `LLMatcher` that has not consumed tokens. This class copies it and does not change it.
        width: number of tokens that the engine can choose. `matcher` may have more tokens (see `read_vocabulary`). None
            if all tokens can be chosen.
        clock: function that returns the CPU seconds of the calling thread.
        on_limit: called when the matcher has exceeded a limit. All copies of an `LLMatcher` share one lexer. If one
            copy exceeds a limit of the lexer, all other copies fail, too.

    Attributes:
        error: reason why the sequence cannot continue; empty if it can.
        bad_grammar: whether the grammar is the cause of `error`. If False, the engine chose a token that the grammar
            does not allow.
        ahead: maximum number of drafts that may be accepted, of the drafts in the last call of `rejection_masks`. It is
            smaller than the number of drafts if the matcher failed on a draft.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        width: int | None = None,
        clock: Callable[[], float] = time.thread_time,
        on_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self.error = ""
        self.bad_grammar = False
        self.ahead = 0
        self._initial = matcher
        self._width = width
        self._matcher = matcher.deep_copy()
        self._output: list[int] = []
        self._looks_ahead = True
        self._clock = clock
        self._on_limit = on_limit
        self._debt = 0.0

    @property
    def ended(self) -> bool:
        """Whether the output is complete according to the grammar, so that no token may follow."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """Consume the next output token. If the grammar does not allow it, set `error`."""
        start_time = self._clock()
        if not self._matcher.consume_token(token) and not self.error:
            if self._exceeded_by(token):
                self._on_limit()
                self._fail(f"the grammar cannot be followed: {error_line(self._matcher)}", bad_grammar=True)
            else:
                self._fail(f"the engine chose token {token}, which the grammar does not allow", bad_grammar=False)
        self._output.append(token)
        self._spent(start_time)

    def forced(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens that come next, if the grammar allows only one continuation of the text.

        The same text may have other tokenizations, so the model may still choose other tokens.
        """
        if not self._looks_ahead:
            return ()
        start_time = self._clock()
        forced = self._matcher.compute_ff_tokens()[:limit]
        usable = self._recovered()
        self._spent(start_time)
        return tuple(takewhile(self._is_choosable, forced)) if usable else ()

    def fitting(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leading drafts that the grammar allows after the output."""
        if not drafts or not self._looks_ahead:
            return ()
        start_time = self._clock()
        count = self._matcher.validate_tokens(list(drafts))
        usable = self._recovered()
        self._spent(start_time)
        return drafts[:count] if usable else ()

    def rejection_masks(self, chosen: Rows[int], drafts: Rows[int]) -> dict[int, Mask]:
        """Return a mask of the allowed tokens for each chosen token that the grammar does not allow.

        Args:
            chosen: the sampled token for the next position of the output, then the sampled token for the position after
                each draft. A negative number means that no token was sampled.
            drafts: the draft tokens after the output.

        Returns:
            Masks by index in `chosen`. Positions after a draft are checked only if the draft is allowed and may be
            accepted.
        """
        start_time = self._clock()
        self.ahead = len(drafts)
        allowed = not drafts and chosen[0] >= 0 and _allows(self._matcher, chosen[0])  # the most frequent case
        masks = {} if allowed else self._rejection_masks(chosen, drafts)
        self._spent(start_time, len(chosen))
        return masks

    def _rejection_masks(self, chosen: Rows[int], drafts: Rows[int]) -> dict[int, Mask]:
        masks: dict[int, Mask] = {}
        matcher = self._matcher
        for row, (token, draft) in enumerate(zip(chosen, (*drafts, None), strict=True)):
            if token < 0:
                break
            if _allows(matcher, token):
                if draft is None or token != draft:
                    break
            else:
                mask = self._mask(matcher)
                if matcher.is_error() or not mask.any():
                    self.ahead = max(row - 1, 0)
                    if row == 0:
                        error = f"cannot be followed: {error_line(matcher)}" if matcher.is_error() else _NO_TOKEN
                        self._fail(f"the grammar {error}", bad_grammar=True)
                    break
                if not _has(mask, token):
                    masks[row] = mask
                if draft is None:
                    break
            if matcher is self._matcher:
                matcher = matcher.deep_copy()
            if not matcher.try_consume_tokens([draft]):
                if matcher.is_error():
                    self.ahead = row
                break
            if matcher.is_stopped():
                break
        if matcher.is_error():
            self._looks_ahead = False  # the next check of drafts would fail again, at the same cost
            self._on_limit()
        return masks

    def _mask(self, matcher: "LLMatcher") -> Mask:
        """Return the mask of the tokens that the engine can choose and the grammar allows next."""
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return mask if self._width is None else mask[: (self._width + 7) // 8]

    def _is_choosable(self, token: int) -> bool:
        return self._width is None or token < self._width

    def _recovered(self) -> bool:
        """Return whether the matcher has no error after it has checked drafts or computed forced tokens.

        If it has an error, replace the matcher, because an `LLMatcher` never leaves its error state. The new matcher
        consumes the output. The sequence then continues without drafts and forced tokens.
        """
        if not self._matcher.is_error():
            return True
        self._looks_ahead = False
        self._on_limit()
        self._matcher = self._replayed()
        if self._matcher.is_error():
            self._fail(f"the grammar cannot be followed: {error_line(self._matcher)}", bad_grammar=True)
        return False

    def _replayed(self) -> "LLMatcher":
        """Return a new `LLMatcher` that has consumed the output."""
        matcher = self._initial.deep_copy()
        matcher.consume_tokens(self._output)
        return matcher

    def _exceeded_by(self, token: int) -> bool:
        """Return whether the grammar allows `token`, and the matcher rejected it only because a limit was exceeded."""
        matcher = self._replayed()
        mask = self._mask(matcher)
        return matcher.is_error() or (_has(mask, token) and not matcher.consume_token(token))

    def _spent(self, begun: float, rows: int = 0) -> None:
        """Add the CPU time since `begun` to the time spent on this grammar. If the time exceeds its limit, set `error`.

        Args:
            begun: value of the clock at the start of the check.
            rows: number of rows that were checked. Each row has a time allowance, which is subtracted.
        """
        self._debt = max(self._debt + self._clock() - begun - rows * _ROW_SECONDS, 0.0)
        if self._debt > _MOST_SECONDS:
            self._fail("the grammar takes too long to follow", bad_grammar=True)

    def _fail(self, error: str, *, bad_grammar: bool) -> None:
        """Set the attributes `error` and `bad_grammar`. Do nothing if an earlier error is set."""
        if not self.error:
            self.error, self.bad_grammar = error, bad_grammar


def _allows(matcher: "LLMatcher", token: int) -> bool:
    """Return whether the grammar allows `token` next.

    For a special token, the result may be False although the grammar allows the token. A mask from `compute_bitmask`
    does not have this error.
    """
    forced = matcher.compute_ff_tokens()
    return forced[0] == token if forced else matcher.validate_tokens([token]) == 1


def _has(mask: Mask, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def error_line(matcher: "LLMatcher") -> str:
    """Return the first line of the matcher's error message."""
    return matcher.get_error().strip().partition("\n")[0]
