"""The grammar matcher of one sequence: reads its output, and determines which tokens the grammar allows next."""

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
    """Matches one sequence's output with its grammar, by means of llguidance's `LLMatcher`.

    The matcher consumes only the output. To check drafts, a copy of the matcher consumes them. `LLMatcher.rollback` is
    not used: it returns True but leaves a wrong state behind if a special token was consumed.

    Args:
        matcher: a matcher at the beginning of the grammar. This class copies it and never changes it.
        clock: function that returns CPU seconds of the calling thread.
        on_limit: called when the matcher reports an error. Copies of a matcher share its lexer. After one copy has
            reached a limit of the lexer, all other copies fail, too.

    Attributes:
        error: reason why the sequence cannot continue; empty if it can.
        bad_grammar: whether the grammar causes `error`. If False, the engine chose a token that the grammar does not
            allow.
        ahead: maximum number of drafts that can be accepted, of the drafts in the last call of `refused`.
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
        """Whether the output is complete by the grammar, so that no token may follow."""
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
        """Return at most `limit` next tokens of the text that must follow, if the grammar allows only one text.

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
        """Return the drafts up to the first draft that the grammar does not allow after the output."""
        if not drafts or not self._looks_ahead:
            return ()
        start_time = self._clock()
        count = self._matcher.validate_tokens(list(drafts))
        usable = self._recovered()
        self._spent(start_time)
        return drafts[:count] if usable else ()

    def refused(self, chosen: Rows[int], drafts: Rows[int]) -> dict[int, Mask]:
        """Return a mask of the allowed tokens for each chosen token that the grammar does not allow.

        Args:
            chosen: one token for the next position of the output, then one token for the position after each draft. A
                negative number means that no token was chosen.
            drafts: draft tokens after the output.

        Returns:
            Masks by index in `chosen`. Positions after a draft are not checked if the draft was not chosen, is not
            allowed, or lies beyond `ahead`.
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
        """Return whether the matcher has no error after a look ahead. After an error, replace the matcher.

        If the matcher fails on drafts or forced tokens (a look ahead), the output may still continue with other tokens.
        A matcher never leaves its error state, so a new matcher is built from the output, and looking ahead is turned
        off.
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
        """Return whether the matcher rejected `token` because of its limits, although the grammar allows the token."""
        matcher = self._replayed()
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return matcher.is_error() or (_has(mask, token) and not matcher.consume_token(token))

    def _spent(self, begun: float, rows: int = 0) -> None:
        """Add the time since `begun` to the time spent on this grammar; fail if it exceeds the limit.

        Args:
            rows: number of rows that were checked in this time.
        """
        self._debt = max(self._debt + self._clock() - begun - rows * _ROW_SECONDS, 0.0)
        if self._debt > _MOST_SECONDS:
            self._fail("the grammar takes too long to follow", bad_grammar=True)

    def _fail(self, error: str, *, bad_grammar: bool) -> None:
        """Set the attributes `error` and `bad_grammar`, unless an earlier error is set."""
        if not self.error:
            self.error, self.bad_grammar = error, bad_grammar


def _allows(matcher: "LLMatcher", token: int) -> bool:
    """Return whether the grammar allows `token` next.

    For a special token, the result may be False although the token is allowed; a mask has no such error.
    """
    forced = matcher.compute_ff_tokens()
    return forced[0] == token if forced else matcher.validate_tokens([token]) == 1


def _has(mask: Mask, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def error_line(matcher: "LLMatcher") -> str:
    """Return the matcher's error in one line."""
    return matcher.get_error().strip().partition("\n")[0]
