"""The step controller: limits the prompt tokens and decode rows of each step, by the measured cost of earlier steps.

Three limits apply:

* Every step: its duration, because requests that arrive must wait for its end. See `StepController.max_prompt_tokens`.
* A step with decode rows and prompt tokens: at most `_MIXED_STRETCH` times the duration of a step in which all
  sequences decode.
* A step for several principals (API key owners): at most `_FAIR_STRETCH` times the duration of a *fair step*. A fair
  step has the same number of rows for each principal: the number of sequences of the lightest principal, which has the
  fewest.

Principals with more sequences than the lightest are *heavy*. If not all sequences of a heavy principal fit into a step,
they alternate. Its prompt tokens get the time that the decode rows leave. If a step took longer than predicted, fair
steps follow until the excess time is compensated.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from helexa.neuron.engine.ipc.messages import EngineOptions
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.scheduling.step_cost import StepCost

# Duration of a step.
_LIMIT_SHARE = 1 / 8  # of the time without progress after which an engine counts as hung
_MIN_TOKENS = 16  # a step of 16 tokens takes hardly longer than a step of one token
_SHORT_SECONDS = 0.5
_MIN_SHORT_TOKENS = 32  # native kernels take as long per token in a step of 32 as in one of 512

# Prompt tokens in steps with decode rows.
_MIXED_STRETCH = 2.0
_FIRST_MIXED_TOKENS = 32  # until their cost is known
_MIN_MIXED_TOKENS = 8
_MAX_MIXED_RUN = 32  # steps in a row; then one is decode-only, to measure decoding
_ROW_MULTIPLE = 8  # of rows in a mixed step, because a step of a new size takes longer

# Fair share.
_FAIR_STRETCH = 1.6
_FAIR_STEP_EVERY = 16  # steps, to measure a fair step
_LIGHT_STEP_EVERY = 8  # steps; then one without prompt tokens of heavy principals, to measure decoding
_FIRST_HEAVY_TOKENS = 8  # prompt tokens of heavy principals, until their cost is known
_MIN_HEAVY_TOKENS = 16  # prompt tokens also add a fixed cost to a step
_MAX_OVERRUN = 8.0  # fair steps

# Nominal seconds of a step, with `step_timing = "fixed"`.
_FIXED_BASE, _FIXED_ROW, _FIXED_TOKEN = 0.01, 0.0005, 0.0002


@dataclass
class StepLimits:
    """Limits of one step by fair share among principals. The default is no limit.

    Attributes:
        rows: maximum number of decoding sequences; None for no limit.
        heavy: principals that have more sequences than the principal with the fewest.
        heavy_tokens: maximum number of prompt tokens of all heavy principals together.
        prompt_tokens: maximum number of prompt tokens of all principals; None for no limit.
    """

    rows: int | None = None
    heavy: frozenset[str] = frozenset()
    heavy_tokens: int = 0
    prompt_tokens: int | None = None

    def tokens_for(self, sequence: Sequence) -> int:
        """Return how many prompt tokens of `sequence` these limits still allow."""
        return self.heavy_tokens if sequence.principal in self.heavy else sequence.pending

    def widen(self, cut: Sequence, tokens: int) -> None:
        """Allow heavy principals at least `tokens` prompt tokens, if `cut` belongs to a light principal.

        Args:
            cut: a prompt that does not fit into the step, so that only a chunk of it is computed.
        """
        if cut.principal not in self.heavy:
            self.heavy_tokens = max(self.heavy_tokens, tokens)

    def take(self, sequence: Sequence, tokens: int) -> None:
        """Subtract `tokens` prompt tokens that were planned for `sequence` from the limits."""
        if sequence.principal in self.heavy:
            self.heavy_tokens -= tokens


class StepController:
    """Limits the steps of one scheduler, and learns the cost of steps from finished steps.

    Args:
        step_seconds: seconds without progress after which the server kills the engine as hung. Steps are limited to a
            fraction of this time; infinite for no such limit.
        token_seconds: measured seconds of a step with one token; 0 if not measured.
    """

    def __init__(self, options: EngineOptions, step_seconds: float = float("inf"), token_seconds: float = 0.0) -> None:
        self._max_step_tokens = options.max_step_tokens
        self._max_mixed_tokens = options.max_prefill_beside_decode
        self._fixed = options.step_timing == "fixed"
        self._cost = StepCost(_FIXED_TOKEN if self._fixed else token_seconds)
        self._max_seconds = step_seconds * _LIMIT_SHARE
        self._step = 0
        self._mixed_run = 0  # steps with decode rows and prompt tokens since the last decode-only one
        self._rows = 0
        self._heavy: frozenset[str] = frozenset()
        self._fair_seconds: float | None = None
        self._overrun = 0.0  # seconds

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum number of prompt tokens of the next step, limited by the predicted duration of the step.

        The number is a power of two or `max_step_tokens`, so that step sizes recur.
        """
        timeout_tokens = max(self._within(self._max_seconds), _MIN_TOKENS)
        return min(timeout_tokens, max(self._within(_SHORT_SECONDS), _MIN_SHORT_TOKENS), self._max_step_tokens)

    def prompt_tokens(self, planned: int, rows: int, width: int, limits: StepLimits) -> int:
        """Return how many prompt tokens the next step may have.

        Args:
            planned: number of tokens that are already in the plan of the step.
            rows: number of decoding sequences that are already in the plan.
            width: number of sequences that will decode when all prompts are prefilled. The limit is a multiple of the
                duration of a decode step with `width` rows. So a few sequences that decode already do not delay the
                prefill of many others.
        """
        most = min(max(self._max_step_tokens - planned, 1), self.max_prompt_tokens)
        if not rows or not self._max_mixed_tokens:
            return most
        most = min(most, self._max_mixed_tokens)
        tokens = min(most, self._mixed_tokens(rows, width), limits.prompt_tokens or most)
        if tokens >= 2 * _ROW_MULTIPLE:  # to the nearest multiple, so that prompts lose nothing on average
            tokens = min(most, (rows + tokens + _ROW_MULTIPLE // 2) // _ROW_MULTIPLE * _ROW_MULTIPLE - rows)
        return tokens

    def limits(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> StepLimits:
        """Return the limits of the next step by fair share among the principals of these sequences."""
        self._step += 1
        prompts = Counter(sequence.principal for sequence in running if not sequence.decoding)
        prompts.update(sequence.principal for sequence in waiting)
        sequence_counts = prompts + Counter(sequence.principal for sequence in running if sequence.decoding)
        self._fair_seconds, self._heavy = None, frozenset()
        if len(sequence_counts) < 2:
            self._overrun = 0.0
            return StepLimits()
        lightest = min(sequence_counts.values())
        fair_rows = lightest * len(sequence_counts)
        heavy = self._heavy = frozenset(principal for principal, count in sequence_counts.items() if count > lightest)
        fair_seconds = self._fair_seconds = self._cost.decode(fair_rows) if self._cost.knows_rows else None
        if self._step % _FAIR_STEP_EVERY == 0 or self._overrun > 0:
            return StepLimits(fair_rows, heavy)
        light_step = self._step % _LIGHT_STEP_EVERY == 0
        if fair_seconds is None:
            self._rows = int(_FAIR_STRETCH * fair_rows)
            return StepLimits(self._rows, heavy, 0 if light_step else self._first_heavy_tokens())
        max_seconds = _FAIR_STRETCH * fair_seconds
        if light_step or heavy.isdisjoint(prompts):
            return StepLimits(
                self._rows_within(max_seconds, fair_rows), heavy, prompt_tokens=self._tokens_within(fair_seconds)
            )
        rows = self._rows_within((max_seconds + fair_seconds) / 2, fair_rows)
        decode = self._cost.decode(min(rows, sum(sequence.decoding for sequence in running))) or fair_seconds
        tokens = max(self._tokens_within(max_seconds - decode), _MIN_HEAVY_TOKENS)
        return StepLimits(rows, heavy, tokens, self._tokens_within(fair_seconds))

    def choose(self, decoding: list[Sequence], rows: int | None) -> list[Sequence]:
        """Return at most `rows` of the decoding sequences for the next step; all of them if `rows` is None.

        First comes one sequence of each principal, then a second sequence of each principal, and so on. Sequences of
        one principal are sorted by the step in which they last decoded, the earliest first.
        """
        chosen = decoding
        if rows is not None and len(decoding) > rows:
            sequence_counts: Counter[str] = Counter()
            order: list[tuple[int, Sequence]] = []
            for sequence in sorted(decoding, key=lambda sequence: sequence.stepped):
                order.append((sequence_counts[sequence.principal], sequence))
                sequence_counts[sequence.principal] += 1
            order.sort(key=lambda pair: pair[0])
            selected = {sequence for _, sequence in order[:rows]}
            chosen = [sequence for sequence in decoding if sequence in selected]
        for sequence in chosen:
            sequence.stepped = self._step
        return chosen

    def learn(self, rows: int, prompts: Mapping[str, int], seconds: float) -> None:
        """Learn from a finished step.

        Args:
            rows: number of decode rows of the step.
            prompts: number of prompt tokens of the step by principal. If a light principal has prompt tokens in the
                step, the time beyond a fair step is not charged to heavy principals.
            seconds: duration of the step.
        """
        tokens = sum(prompts.values())
        if self._fixed:
            seconds = _FIXED_BASE + _FIXED_ROW * rows + _FIXED_TOKEN * tokens
        # Small steps predict the time per token of large steps badly, so they count only if they exceed the time limit.
        if tokens and (rows + tokens >= self.max_prompt_tokens // 2 or seconds > self._max_seconds):
            self._cost.learn_worst(rows + tokens, seconds)
        if self._fair_seconds is not None:
            charged_seconds = min(seconds, self._fair_seconds) if prompts.keys() - self._heavy else seconds
            overrun = self._overrun + charged_seconds - _FAIR_STRETCH * self._fair_seconds
            self._overrun = min(max(overrun, 0.0), _MAX_OVERRUN * self._fair_seconds)
        if rows:
            self._mixed_run = self._mixed_run + 1 if tokens else 0
            self._cost.learn(rows, tokens, seconds)

    def _within(self, seconds: float) -> int:
        """Return the largest power of two, at most `max_step_tokens`, of tokens that a step computes in `seconds`."""
        worst = self._cost.worst_token
        affordable = seconds / worst if worst > 0 else float("inf")
        return self._max_step_tokens if affordable >= self._max_step_tokens else 1 << int(affordable).bit_length() >> 1

    def _mixed_tokens(self, rows: int, width: int) -> int:
        """Return how many prompt tokens can be added to a step with `rows` decode rows.

        With these tokens, the step takes `_MIXED_STRETCH` times the duration of a decode step with `width` rows.
        """
        if self._mixed_run >= _MAX_MIXED_RUN:
            return 0
        step_seconds, full_step_seconds = self._cost.decode(rows), self._cost.decode(width)
        if step_seconds is None or full_step_seconds is None or self._cost.token is None:
            return _FIRST_MIXED_TOKENS
        return max(
            int((_MIXED_STRETCH * full_step_seconds - step_seconds) / max(self._cost.token, 1e-9)), _MIN_MIXED_TOKENS
        )

    def _tokens_within(self, seconds: float) -> int:
        """Return how many prompt tokens add `seconds` to the duration of a step.

        The result is at least one, so that every prompt advances.
        """
        token = self._cost.token
        tokens = _FIRST_MIXED_TOKENS if token is None else int(seconds / max(token, 1e-9))
        return min(max(tokens, 1), self._max_mixed_tokens or tokens)

    def _first_heavy_tokens(self) -> int:
        """Return the limit on the prompt tokens of heavy principals that applies if the cost of rows is unknown."""
        average = self._cost.decode(0)
        if average is None or self._cost.token is None:
            return _FIRST_HEAVY_TOKENS
        return max(self._tokens_within((_FAIR_STRETCH - 1) * average), _FIRST_HEAVY_TOKENS)

    def _rows_within(self, seconds: float, fair_rows: int) -> int:
        """Return how many decode rows a step of `seconds` can have, at least `fair_rows`.

        The result is at most twice the last result, because estimates far from measured row counts are unreliable.
        """
        self._rows = int(min(max(self._cost.rows(seconds), fair_rows), max(2 * self._rows, fair_rows)))
        return self._rows
