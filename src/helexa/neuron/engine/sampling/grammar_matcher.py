"""The grammar matcher of one sequence: follows its output, and determines the tokens that may come next."""

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

_ROW_SECONDS = 0.02  # CPU seconds allowed per checked row; all sequences of a step wait for the check
_MOST_SECONDS = 0.5  # CPU seconds beyond the allowed time, after which the sequence ends
_NO_TOKEN = "leaves no token of the model's vocabulary"


class GrammarMatcher:
    """Follows one sequence's output through its grammar.

    The matcher consumes the output and nothing else. Drafts are consumed by a copy: `LLMatcher.rollback` returns True
    but leaves a wrong state behind if a special token was consumed.

    Args:
        matcher: a matcher at the beginning of the grammar; it is copied and never changed.
        clock: returns CPU seconds of the calling thread.
        on_limit: called when the matcher reports an error. Copies of a matcher share its lexer, so after one copy has
            reached a limit of the lexer, the other copies and all later copies fail, too.

    Attributes:
        error: why the sequence cannot continue; empty if it can.
        bad_grammar: the grammar causes `error`. If False, the engine chose a token that the grammar does not allow.
        ahead: maximum number of accepted drafts among the drafts that `refused` received last.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        clock: Callable[[], float] = time.thread_time,
        on_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self.error = ""
        self.bad_grammar = False
        self.ahead = 0
        self._initial = matcher
        self._matcher = matcher.deep_copy()
        self._output: list[int] = []
        self._looks_ahead = True
        self._clock = clock
        self._on_limit = on_limit
        self._debt = 0.0

    @property
    def ended(self) -> bool:
        """Whether the grammar is complete, and no token may follow."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """Consume the next token of the output."""
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
        """Return the next tokens, at most `limit`, if the grammar allows one text only.

        The text may have other tokenizations, so the model may still choose other tokens.
        """
        if not self._looks_ahead:
            return ()
        start_time = self._clock()
        forced = tuple(self._matcher.compute_ff_tokens()[:limit])
        usable = self._recovered()
        self._spent(start_time)
        return forced if usable else ()

    def fitting(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leading drafts that the grammar allows after the output."""
        if not drafts or not self._looks_ahead:
            return ()
        start_time = self._clock()
        count = self._matcher.validate_tokens(list(drafts))
        usable = self._recovered()
        self._spent(start_time)
        return drafts[:count] if usable else ()

    def refused(self, chosen: Rows[int], drafts: Rows[int]) -> dict[int, Mask]:
        """Return masks for the chosen tokens that the grammar does not allow.

        Args:
            chosen: a token for the output's next position and one for the position after each draft; a negative number
                means no token.
            drafts: draft tokens after the output.

        Returns:
            Masks of the allowed tokens, by their index in `chosen`. Positions after a draft that is not chosen, not
                allowed or
            beyond `ahead` are not checked.
        """
        start_time = self._clock()
        self.ahead = len(drafts)
        allowed = not drafts and chosen[0] >= 0 and _allows(self._matcher, chosen[0])  # the most frequent case
        masks = {} if allowed else self._refused(chosen, drafts)
        self._spent(start_time, len(chosen))
        return masks

    def _refused(self, chosen: Rows[int], drafts: Rows[int]) -> dict[int, Mask]:
        masks: dict[int, Mask] = {}
        matcher = self._matcher
        for row, (token, draft) in enumerate(zip(chosen, (*drafts, None), strict=True)):
            if token < 0:
                break
            if _allows(matcher, token):
                if draft is None or token != draft:
                    break
            else:
                mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
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
            self._looks_ahead = False  # the next look ahead would fail again, at the same cost
            self._on_limit()
        return masks

    def _recovered(self) -> bool:
        """Return whether the matcher had no error; after an error, rebuild the matcher from the output.

        An error in a look ahead is not an error of the output, which may continue with other tokens. A matcher never
        leaves its error state. So the matcher is replaced, and the look ahead is turned off.
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
        """Return a new matcher that has consumed the output."""
        matcher = self._initial.deep_copy()
        matcher.consume_tokens(self._output)
        return matcher

    def _exceeded_by(self, token: int) -> bool:
        """Return whether `token`, which the matcher did not consume, is allowed but exceeds the matcher's limits."""
        matcher = self._replayed()
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return matcher.is_error() or (_has(mask, token) and not matcher.consume_token(token))

    def _spent(self, begun: float, rows: int = 0) -> None:
        """Count the time since `begun`, in which `rows` rows were checked; fail if the time exceeds the limit."""
        self._debt = max(self._debt + self._clock() - begun - rows * _ROW_SECONDS, 0.0)
        if self._debt > _MOST_SECONDS:
            self._fail("the grammar takes too long to follow", bad_grammar=True)

    def _fail(self, error: str, *, bad_grammar: bool) -> None:
        """Set the error, unless an earlier error is set."""
        if not self.error:
            self.error, self.bad_grammar = error, bad_grammar


def _allows(matcher: "LLMatcher", token: int) -> bool:
    """Return whether `token` may come next.

    For special tokens, False may be wrong; a mask is exact.
    """
    forced = matcher.compute_ff_tokens()
    return forced[0] == token if forced else matcher.validate_tokens([token]) == 1


def _has(mask: Mask, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def error_line(matcher: "LLMatcher") -> str:
    """Return the matcher's error in one line."""
    return matcher.get_error().strip().partition("\n")[0]
