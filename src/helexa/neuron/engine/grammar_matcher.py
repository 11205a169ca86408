"""Matches outputs with grammars: token masks, and the vocabulary of a model."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from helexa.core.errors import HelexaError

if TYPE_CHECKING:  # only requests with a grammar need llguidance, whose import would lengthen each engine's start
    from llguidance import LLMatcher, LLTokenizer


_MARKER = 0xFF  # llguidance marks special tokens with this byte, which UTF-8 never contains
_MAX_TOKEN = 250  # bytes; llguidance cannot represent much longer tokens

Mask = NDArray[np.uint8]  # Allowed tokens, one bit per token id: bit t % 8 of byte t // 8 is 1 if token t is allowed

_ROW_SECONDS = 0.02  # CPU seconds allowed per checked row, because all sequences of a step wait for the check
_MOST_SECONDS = 0.5  # a sequence whose checks exceed the allowed CPU time by this much ends with an error
_NO_TOKEN = "the grammar allows no token of the model's vocabulary at this point; change the grammar"


class _Vocabulary:
    """A model's vocabulary with the tokenizer interface that llguidance requires."""

    def __init__(self, model: Path, width: int) -> None:
        from helexa.neuron.text.model_text import ModelText  # slow import that most engines never need

        tokenizer = ModelText.open(model).tokenizer
        self._tokenizer = tokenizer
        tokens = (tokenizer.token_bytes(token, skip_special=False) for token in range(width))
        self.tokens = [token if len(token) <= _MAX_TOKEN else b"" for token in tokens]
        self.ends = sorted(end for end in tokenizer.eos_ids if end < width)
        special = {token for token in range(width) if self.tokens[token] and not tokenizer.token_bytes(token)}
        special.update(self.ends)  # end tokens are never part of a text, even if their bytes spell one
        self.special_token_ids = sorted(special)
        self._special = special
        if not self.ends:
            raise HelexaError(
                "the model's vocabulary has no token that ends an answer, which a grammar needs; use another model"
            )
        self.eos_token_id = self.ends[0]
        # llguidance would treat this token as special. A wrong configuration may name a token that occurs in text.
        self.bos_token_id = tokenizer.bos_id if tokenizer.bos_id in special else None
        spelled = {self.tokens[token] for token in range(width) if token not in special}
        missing = [byte for byte in map(_byte, range(_MARKER)) if byte not in spelled]
        if missing:
            # llguidance requires a token for each byte. The missing tokens get ids after the ids of the logits, so the
            # engine never samples them. Empty tokens pad the vocabulary so that these ids begin at a new byte of a
            # mask, because `_mask` cuts off the bits of these ids in whole bytes.
            self.tokens += [b""] * (-width % 8) + missing
        # function that returns the longest tokens of a text, from left to right
        self.greedy: Callable[[str], list[int]] = lambda _: []

    def __call__(self, encoded: bytes) -> list[int]:
        """Return the tokens of a text within an output. Their joined bytes are `encoded`."""
        text = encoded.decode("utf-8", "replace")
        ids = self._tokenizer.encode(text, parse_special=False, continues=True)
        spelled = [self._tokenizer.token_bytes(token) for token in ids]
        # Some tokenizers change the text. For example, Qwen's tokenizer composes accents.
        is_exact = b"".join(spelled) == encoded and all(len(token) <= _MAX_TOKEN for token in spelled)
        if not is_exact or not self._special.isdisjoint(ids):
            # llguidance reads the bytes of the tokens, and here they would be another text than `encoded`.
            return self.greedy(text)
        return ids


def read_vocabulary(model: Path, width: int) -> "LLTokenizer":
    """Return a model's vocabulary for grammar matchers, from its file or folder.

    Args:
        width: number of logits per row. The result has a token for each logit, and further tokens for bytes that no
            token spells, which the engine never samples.

    Raises:
        HelexaError: the vocabulary is missing, or has no end token.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Vocabulary(model, width)
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=width, eos_token=vocabulary.ends)
    vocabulary.tokens.clear()  # the tokenizer has a copy
    vocabulary.greedy = tokenizer.greedy_tokenize
    return tokenizer


def _byte(value: int) -> bytes:
    return bytes((value,))


class GrammarMatcher:
    """Matches the output of a sequence with its grammar (llguidance's `LLMatcher`)."""

    def __init__(
        self,
        matcher: "LLMatcher",
        width: int | None = None,
        clock: Callable[[], float] = time.thread_time,
        on_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self.error = ""  # reason why the sequence cannot continue; empty if it can
        # Whether the grammar is the cause of `error`. If False, the engine chose a token that the grammar does not
        # allow.
        self.bad_grammar = False
        # Maximum number of drafts that may be accepted, of the drafts in the last call of `rejection_masks`. It is
        # smaller than the number of drafts if the matcher failed on a draft.
        self.ahead = 0
        # An `LLMatcher` that has not consumed tokens. This class copies it and does not change it.
        self._initial = matcher
        # Number of tokens that the engine can choose. `matcher` may have more tokens (see `read_vocabulary`). None if
        # all tokens can be chosen.
        self._width = width
        # This matcher consumes only output tokens. Copies of it consume drafts, because `LLMatcher.rollback` is wrong
        # after special tokens: it returns True, but leaves the matcher in a wrong state.
        self._matcher = matcher.deep_copy()
        self._output: list[int] = []
        self._looks_ahead = True  # whether to match tokens beyond the output; False after such a match has failed
        self._clock = clock  # function that returns the CPU seconds of the calling thread
        # Called when the matcher has exceeded a limit. All copies of an `LLMatcher` share one lexer. If one copy
        # exceeds a limit of the lexer, all other copies fail, too.
        self._on_limit = on_limit
        self._debt = 0.0  # CPU seconds of the checks so far beyond the allowances of the checked rows

    @property
    def ended(self) -> bool:
        """Whether the output is complete and no further token may follow."""
        return self._matcher.is_stopped()

    def advance(self, token: int) -> None:
        """Consume an output token; set `error` if it is not allowed or exceeds a limit."""
        start_time = self._clock()
        if not self._matcher.consume_token(token) and not self.error:
            if self._exceeded_by(token):
                self._on_limit()
                self._fail(_cannot_follow(self._matcher), bad_grammar=True)
            else:
                self._fail(
                    f"the engine chose token {token}, which the grammar does not allow; try again", bad_grammar=False
                )
        self._output.append(token)
        self._spent(start_time)

    def forced(self, limit: int) -> tuple[int, ...]:
        """Return up to `limit` tokens of the text that the grammar forces; else ().

        Once a match of tokens beyond the output has exceeded a limit, the result is always ().
        """
        if not self._looks_ahead:
            return ()
        start_time = self._clock()
        # The same text may have other tokenizations, so the model may still choose other tokens.
        forced = self._matcher.compute_ff_tokens()[:limit]
        usable = self._recovered()
        self._spent(start_time)
        return tuple(takewhile(self._is_choosable, forced)) if usable else ()

    def fitting(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the longest prefix of `drafts` that the grammar allows after the output.

        As in `forced`, the result is always () once a limit was exceeded.
        """
        if not drafts or not self._looks_ahead:
            return ()
        start_time = self._clock()
        count = self._matcher.validate_tokens(list(drafts))
        usable = self._recovered()
        self._spent(start_time)
        return drafts[:count] if usable else ()

    def rejection_masks(self, chosen: Rows[int], drafts: Rows[int]) -> dict[int, Mask]:
        """Return a mask of the allowed tokens for each chosen token that is not allowed.

        Tokens after a rejected draft are not checked. The call sets `ahead`, and `error` if no token is allowed.

        Args:
            chosen: the sampled token for the next position of the output, then the sampled token for the position after
                each draft. A negative number means that no token was sampled.
            drafts: the draft tokens after the output.

        Returns:
            Masks by index in `chosen`.
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
                # Without an equal draft, the tokens of later positions are not used.
                if draft is None or token != draft:
                    break
            else:
                mask = self._mask(matcher)
                if matcher.is_error() or not mask.any():
                    self.ahead = max(row - 1, 0)
                    if row == 0:
                        error = _cannot_follow(matcher) if matcher.is_error() else _NO_TOKEN
                        self._fail(error, bad_grammar=True)
                    break
                # `_allows` may be wrong about special tokens, but the mask is not.
                if not _has(mask, token):
                    masks[row] = mask
                if draft is None:
                    break
            if matcher is self._matcher:
                # The drafts may still be rejected, so the matcher of the output must not consume them.
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
        """Return the mask of the next tokens that grammar and engine allow."""
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return mask if self._width is None else mask[: (self._width + 7) // 8]

    def _is_choosable(self, token: int) -> bool:
        return self._width is None or token < self._width

    def _recovered(self) -> bool:
        """Return True if the matcher has not failed; else replace it and return False."""
        if not self._matcher.is_error():
            return True
        self._looks_ahead = False
        self._on_limit()
        # The matcher failed on tokens beyond the output, so the sequence can continue without drafts.
        self._matcher = self._replayed()  # an `LLMatcher` never leaves its error state
        if self._matcher.is_error():
            self._fail(_cannot_follow(self._matcher), bad_grammar=True)
        return False

    def _replayed(self) -> "LLMatcher":
        """Return a new `LLMatcher` that has consumed the output."""
        matcher = self._initial.deep_copy()
        matcher.consume_tokens(self._output)
        return matcher

    def _exceeded_by(self, token: int) -> bool:
        """Return whether a limit is the only reason why `token` was rejected."""
        matcher = self._replayed()
        mask = self._mask(matcher)
        return matcher.is_error() or (_has(mask, token) and not matcher.consume_token(token))

    def _spent(self, begun: float, rows: int = 0) -> None:
        """Add the CPU time since `begun`; set `error` if the time exceeds its limit.

        Args:
            begun: value of the clock at the start of the check.
            rows: number of rows that were checked. Each row has a time allowance, which is subtracted.
        """
        self._debt = max(self._debt + self._clock() - begun - rows * _ROW_SECONDS, 0.0)
        if self._debt > _MOST_SECONDS:
            self._fail("the grammar takes too long to follow; simplify it", bad_grammar=True)

    def _fail(self, error: str, *, bad_grammar: bool) -> None:
        """Set `error` and `bad_grammar`, unless an earlier error is set."""
        if not self.error:
            self.error, self.bad_grammar = error, bad_grammar


def _allows(matcher: "LLMatcher", token: int) -> bool:
    """Return whether the grammar allows `token` next.

    The result may be wrongly False for a special token.
    """
    # This check is cheaper than a mask. The caller computes a mask only if the result is False.
    forced = matcher.compute_ff_tokens()
    return forced[0] == token if forced else matcher.validate_tokens([token]) == 1


def _has(mask: Mask, token: int) -> bool:
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _cannot_follow(matcher: "LLMatcher") -> str:
    return f"the grammar cannot be followed: {error_line(matcher)}; simplify the grammar"


def error_line(matcher: "LLMatcher") -> str:
    """Return the first line of the matcher's error message."""
    return matcher.get_error().strip().partition("\n")[0]
