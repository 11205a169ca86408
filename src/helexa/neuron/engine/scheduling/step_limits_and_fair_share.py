"""Limits prompt tokens and decode rows of a step by the measured cost of steps.

A decode row is one token of a decoding sequence. `StepCost` predicts the duration of a step: base + row * (decode rows)
+ token * (prompt tokens), with coefficients from the durations of finished steps. There are three limits:

* Every step has a maximum duration, because new requests wait for the end of the current step. See
  `StepController.max_prompt_tokens`.
* A step with decode rows and prompt tokens takes at most `_MIXED_STRETCH` times as long as a decode step of all
  sequences.
* If several principals (API key owners) have sequences, a step takes at most `_FAIR_STRETCH` times as long as a *fair
  step*. In a fair step, every principal has the same number of decode rows. This number is the smallest number of
  sequences that a principal has.

A principal with more sequences than this number is *heavy*, the others are *light*. If the sequences of a heavy
principal do not all fit into a step, they alternate from step to step. Prompt tokens of heavy principals only get the
time that the decode rows leave. If a step exceeds the time limit for several principals, fair steps follow until the
excess time is compensated.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from helexa.neuron.engine.ipc.engine_options import EngineOptions
from helexa.neuron.engine.scheduling.sequence import Sequence

# Cost model.
_LINE_DECAY = 0.97  # factor by which each new decode-only step reduces the weight of earlier ones
_MIN_SPREAD = 0.02  # ratio of the row counts' standard deviation to their mean below which the slope is unknown
_MAX_OUTLIER = 3.0  # durations are cut off at this multiple of their prediction, because the machine may have slept
_EWMA_WEIGHT = 0.25  # weight of the latest step in moving averages
_WORST_OF = 4  # number of latest steps of which the slowest counts, because the load from other processes varies

# Duration of a step.
_LIMIT_SHARE = 1 / 8  # maximum duration of a step, as a fraction of the time after which an engine counts as hung
_MIN_TOKENS = 16  # lower bound of the limit, because a step of 16 tokens takes hardly longer than a step of one token
_SHORT_SECONDS = 0.5  # seconds that a step should take at most, so that new requests start soon
_MIN_SHORT_TOKENS = 32  # native kernels take as long per token in a step of 32 tokens as in a step of 512

# Prompt tokens in steps with decode rows.
_MIXED_STRETCH = 2.0
_FIRST_MIXED_TOKENS = 32  # prompt tokens in a step, until the cost of a prompt token is known
_MIN_MIXED_TOKENS = 8
_MAX_MIXED_RUN = 32  # mixed steps in a row; then one step is decode-only, to measure the duration of decoding
_ROW_MULTIPLE = 8  # a mixed step has a multiple of this many rows, because a step of a new size takes longer

# Fair share.
_FAIR_STRETCH = 1.6
_FAIR_STEP_EVERY = 16  # one of this many steps is a fair step (see the module), whose duration is measured
# One of this many steps has no prompt tokens of heavy principals, so that the duration of decoding is measured.
_LIGHT_STEP_EVERY = 8
_FIRST_HEAVY_TOKENS = 8  # prompt tokens of heavy principals, until the cost of a prompt token is known
_MIN_HEAVY_TOKENS = 16  # minimum prompt tokens of heavy principals, because fewer would cost nearly as much time
_MAX_OVERRUN = 8.0  # maximum excess time, in durations of a fair step

# Nominal seconds of a step, with `step_timing = "fixed"`.
_FIXED_BASE, _FIXED_ROW, _FIXED_TOKEN = 0.01, 0.0005, 0.0002


class StepCost:
    """Cost model that learns from finished steps and predicts durations of steps.

    A step takes `base` seconds, `row` seconds per decode row, and `token` seconds per prompt token. `base` and `row`
    are learned from decode-only steps, `token` from steps with decode rows and prompt tokens.
    """

    def __init__(self, token_seconds: float = 0.0) -> None:
        # seconds that one prompt token adds to a step with decode rows; None until measured
        self.token: float | None = None
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # sums over steps: 1, rows, seconds, rows * rows, rows * seconds
        # `base` and `row`: seconds of a step without rows, and seconds per row; None until measured
        self._line: tuple[float, float] | None = None
        self._decode: float | None = None  # moving average of the seconds of decode-only steps
        # measured seconds of a step with one token, used as the first value of `worst_token`; 0 if unknown
        self._first_worst = token_seconds
        self._worst: deque[float] = deque(maxlen=_WORST_OF)

    @property
    def knows_rows(self) -> bool:
        """Whether the cost of a decode row is known, from steps with different row counts."""
        return self._line is not None

    @property
    def worst_token(self) -> float:
        """Highest seconds per token of the last steps for `learn_worst`; 0 if unknown."""
        return max(self._worst, default=self._first_worst)

    def decode(self, rows: int) -> float | None:
        """Return the predicted seconds of a decode-only step; None until one was measured."""
        # Until the cost of a row is known, the prediction is the average of all decode-only steps.
        return self._decode if self._line is None else self._line[0] + self._line[1] * rows

    def rows(self, seconds: float) -> float:
        """Return how many decode rows a decode-only step computes in `seconds`.

        The caller must check `knows_rows` before.
        """
        assert self._line is not None
        base, row = self._line
        return (seconds - base) / row if row > 0 else float("inf")

    def learn(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from a finished step with decode rows that took `seconds`."""
        if not prompt_tokens:
            self._learn_decode(rows, seconds)
        elif (decode := self.decode(rows)) is not None:
            self.token = _averaged(self.token, max(seconds - decode, 0.0) / prompt_tokens)

    def learn_worst(self, tokens: int, seconds: float) -> None:
        """Learn `worst_token` from a step of `tokens` tokens (see `StepController.learn`)."""
        self._worst.append(seconds / tokens)

    def _learn_decode(self, rows: int, seconds: float) -> None:
        self._decode = _averaged(self._decode, seconds)
        if self._line is not None:
            seconds = min(seconds, _MAX_OUTLIER * (self._line[0] + self._line[1] * rows))
        new = (1.0, rows, seconds, rows * rows, rows * seconds)
        # Least squares of seconds over rows, with weights that decay with the age of a step.
        n, x, y, xx, xy = self._sums = tuple(  # type: ignore[assignment]
            old * _LINE_DECAY + value for old, value in zip(self._sums, new, strict=True)
        )
        mean_x, mean_y = x / n, y / n
        variance = xx / n - mean_x * mean_x
        # Steps with nearly the same number of rows do not show the slope.
        if variance <= (_MIN_SPREAD * mean_x) ** 2:
            self._line = None
        else:
            # Noise must not yield a negative cost of a row or of an empty step.
            row = min(max((xy / n - mean_x * mean_y) / variance, 0.0), mean_y / mean_x)
            self._line = (mean_y - row * mean_x, row)


def _averaged(average: float | None, latest: float) -> float:
    return latest if average is None else average + _EWMA_WEIGHT * (latest - average)


@dataclass
class StepLimits:
    """Limits of one step that give principals (API key owners) fair shares."""

    rows: int | None = None  # maximum number of decoding sequences in the step; None for no limit
    # principals that have more sequences than the principal with the fewest sequences
    heavy: frozenset[str] = frozenset()
    heavy_tokens: int = 0  # number of prompt tokens that all `heavy` principals together may still have in the step
    prompt_tokens: int | None = None  # maximum number of prompt tokens of all principals together; None for no limit

    def tokens_for(self, sequence: Sequence) -> int:
        """Return how many tokens of `sequence` the limit of its principal still allows."""
        return self.heavy_tokens if sequence.principal in self.heavy else sequence.pending

    def widen(self, chunked: Sequence, tokens: int) -> None:
        """Let `heavy_tokens` be at least `tokens`, if `chunked` is of no heavy principal.

        Args:
            chunked: a prompt of which only a chunk fits into the step.
            tokens: number of prompt tokens of the step that prompts other than `chunked` may use.
        """
        if chunked.principal not in self.heavy:
            self.heavy_tokens = max(self.heavy_tokens, tokens)

    def take(self, sequence: Sequence, tokens: int) -> None:
        """Subtract `tokens` from `heavy_tokens`, if `sequence` is of a heavy principal."""
        if sequence.principal in self.heavy:
            # An image that must be computed in one step may take more tokens than allowed.
            self.heavy_tokens = max(self.heavy_tokens - tokens, 0)


class StepController:
    """Limits the steps of one scheduler by the measured durations of finished steps.

    Args:
        step_seconds: seconds without progress after which the server kills the engine as hung; infinity for no limit.
        token_seconds: measured seconds of a step with one token; 0 if not measured.
    """

    def __init__(self, options: EngineOptions, step_seconds: float = float("inf"), token_seconds: float = 0.0) -> None:
        self._max_step_tokens = options.max_step_tokens
        self._max_mixed_tokens = options.max_prefill_beside_decode
        self._fixed = options.step_timing == "fixed"
        self._cost = StepCost(_FIXED_TOKEN if self._fixed else token_seconds)
        self._max_seconds = step_seconds * _LIMIT_SHARE
        self._step = 0
        self._mixed_run = 0  # number of steps with decode rows and prompt tokens since the last decode-only step
        self._rows = 0  # last maximum number of decode rows; the next maximum is at most twice as high
        self._heavy: frozenset[str] = frozenset()
        # predicted seconds of a step in which each principal has the same number of decode rows (a fair step); None if
        # unknown, or if only one principal has sequences
        self._fair_seconds: float | None = None
        self._overrun = 0.0  # seconds by which steps exceeded their fair-share limit, until fair steps compensate them

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum prompt tokens with which the next step should keep its time limit.

        The number is a power of two or `max_step_tokens`.
        """
        timeout_tokens = max(self._within(self._max_seconds), _MIN_TOKENS)
        return min(timeout_tokens, max(self._within(_SHORT_SECONDS), _MIN_SHORT_TOKENS), self._max_step_tokens)

    def prompt_tokens(self, planned: int, rows: int, width: int, limits: StepLimits) -> int:
        """Return the maximum number of prompt tokens of the next step.

        The result is 0 if this step must be decode-only (see `_MAX_MIXED_RUN`), else at least 1.

        Args:
            planned: number of tokens that the plan of the step already has.
            rows: number of decoding sequences that the plan already has.
            width: number of sequences that will decode after all prompts are prefilled.
            limits: the limits by fair share among principals.
        """
        most = min(max(self._max_step_tokens - planned, 1), self.max_prompt_tokens)
        if not rows or not self._max_mixed_tokens:
            return most
        most = min(most, self._max_mixed_tokens)
        # The time limit depends on `width`. If it depended on `rows` alone, a few decoding sequences would delay the
        # prefill of many others.
        tokens = min(most, self._mixed_tokens(rows, width), limits.prompt_tokens or most)
        if tokens >= 2 * _ROW_MULTIPLE:  # round to the nearest multiple, so that prompts lose no tokens on average
            tokens = min(most, (rows + tokens + _ROW_MULTIPLE // 2) // _ROW_MULTIPLE * _ROW_MULTIPLE - rows)
        return tokens

    def limits(self, running: Collection[Sequence], waiting: Mapping[str, int]) -> StepLimits:
        """Begin a step, and return the limits that give each principal a fair share of it.

        Args:
            waiting: number of waiting sequences by principal.
        """
        self._step += 1
        prompts = Counter(sequence.principal for sequence in running if not sequence.decoding)
        prompts.update(waiting)
        sequence_counts = prompts + Counter(sequence.principal for sequence in running if sequence.decoding)
        self._fair_seconds, self._heavy = None, frozenset()
        # A single principal shares with no other principal.
        if len(sequence_counts) < 2:
            self._overrun = 0.0
            return StepLimits()
        lightest = min(sequence_counts.values())
        fair_rows = lightest * len(sequence_counts)
        heavy = self._heavy = frozenset(principal for principal, count in sequence_counts.items() if count > lightest)
        fair_seconds = self._fair_seconds = self._cost.decode(fair_rows) if self._cost.knows_rows else None
        # In a fair step, each principal has the same number of rows. Fair steps are due at fixed intervals, so that
        # their duration is measured, and after steps with excess time, to compensate this time.
        if self._step % _FAIR_STEP_EVERY == 0 or self._overrun > 0:
            return StepLimits(fair_rows, heavy)
        light_step = self._step % _LIGHT_STEP_EVERY == 0
        if fair_seconds is None:
            # The cost of a row is unknown, so the time is assumed to grow with the rows.
            self._rows = int(_FAIR_STRETCH * fair_rows)
            return StepLimits(self._rows, heavy, 0 if light_step else self._first_heavy_tokens())
        max_seconds = _FAIR_STRETCH * fair_seconds
        if light_step or heavy.isdisjoint(prompts):
            return StepLimits(
                self._rows_within(max_seconds, fair_rows), heavy, prompt_tokens=self._tokens_within(fair_seconds)
            )
        # Half of the time beyond a fair step is for decode rows of heavy principals, the rest for their prompts.
        rows = self._rows_within((max_seconds + fair_seconds) / 2, fair_rows)
        decode = self._cost.decode(min(rows, sum(sequence.decoding for sequence in running))) or fair_seconds
        tokens = max(self._tokens_within(max_seconds - decode), _MIN_HEAVY_TOKENS)
        return StepLimits(rows, heavy, tokens, self._tokens_within(fair_seconds))

    def choose(self, decoding: list[Sequence], rows: int | None) -> list[Sequence]:
        """Return at most `rows` (None: all) of the `decoding` sequences for the next step.

        One sequence of each principal is chosen first, then a second sequence of each principal, and so on. The result
        has the order of `decoding`. The choice is recorded: of one principal, omitted sequences come first next time.
        """
        chosen = decoding
        if rows is not None and len(decoding) > rows:
            sequence_counts: Counter[str] = Counter()
            order: list[tuple[int, Sequence]] = []
            # Of one principal, the sequence that has not decoded for the most steps comes first.
            for sequence in sorted(decoding, key=lambda sequence: sequence.stepped):
                order.append((sequence_counts[sequence.principal], sequence))
                sequence_counts[sequence.principal] += 1
            order.sort(key=lambda pair: pair[0])
            selected = {sequence for _, sequence in order[:rows]}
            chosen = [sequence for sequence in decoding if sequence in selected]
        for sequence in chosen:
            sequence.stepped = self._step
        return chosen

    def expected_seconds(self, tokens: int) -> float:
        """Return a high estimate of a step's seconds with `tokens` tokens; 0 if unknown."""
        if self._fixed or self._cost.worst_token <= 0:
            return 0.0
        return max(self._cost.worst_token * tokens, self._cost.decode(tokens) or 0.0)

    def learn(self, rows: int, prompts: Mapping[str, int], seconds: float) -> None:
        """Learn the costs of a finished step, and its excess over the fair-share limit.

        `StepCost.worst_token` is learned only from steps with prompt tokens that have at least `max_prompt_tokens` // 2
        tokens in total, or exceed the maximum duration of a step.

        Args:
            rows: number of decode rows of the step.
            prompts: number of prompt tokens in the step by principal.
        """
        tokens = sum(prompts.values())
        if self._fixed:
            seconds = _FIXED_BASE + _FIXED_ROW * rows + _FIXED_TOKEN * tokens
        # Small steps predict the time per token of large steps badly, so they count only if they exceed the time limit.
        if tokens and (rows + tokens >= self.max_prompt_tokens // 2 or seconds > self._max_seconds):
            self._cost.learn_worst(rows + tokens, seconds)
        if self._fair_seconds is not None:
            # Prompts of principals that are not heavy made the step longer. This time does not count as excess time.
            charged_seconds = min(seconds, self._fair_seconds) if prompts.keys() - self._heavy else seconds
            overrun = self._overrun + charged_seconds - _FAIR_STRETCH * self._fair_seconds
            self._overrun = min(max(overrun, 0.0), _MAX_OVERRUN * self._fair_seconds)
        if rows:
            self._mixed_run = self._mixed_run + 1 if tokens else 0
            self._cost.learn(rows, tokens, seconds)

    def _within(self, seconds: float) -> int:
        """Return how many tokens a step computes in `seconds`, at most `max_step_tokens`."""
        worst = self._cost.worst_token
        affordable = seconds / worst if worst > 0 else float("inf")
        # A power of two, so that steps have few different sizes.
        return self._max_step_tokens if affordable >= self._max_step_tokens else 1 << int(affordable).bit_length() >> 1

    def _mixed_tokens(self, rows: int, width: int) -> int:
        """Return how many prompt tokens to add to `rows` decode rows; 0 for decode-only.

        `width` is the number of sequences that will decode after all prompts.
        """
        if self._mixed_run >= _MAX_MIXED_RUN:
            return 0
        step_seconds, full_step_seconds = self._cost.decode(rows), self._cost.decode(width)
        if step_seconds is None or full_step_seconds is None or self._cost.token is None:
            return _FIRST_MIXED_TOKENS
        # With these tokens, the step should take `_MIXED_STRETCH` times as long as a decode step of all sequences.
        return max(
            int((_MIXED_STRETCH * full_step_seconds - step_seconds) / max(self._cost.token, 1e-9)), _MIN_MIXED_TOKENS
        )

    def _tokens_within(self, seconds: float) -> int:
        """Return how many prompt tokens lengthen a step by `seconds`, at least one."""
        token = self._cost.token
        tokens = _FIRST_MIXED_TOKENS if token is None else int(seconds / max(token, 1e-9))
        return min(max(tokens, 1), self._max_mixed_tokens or tokens)

    def _first_heavy_tokens(self) -> int:
        """Return `StepLimits.heavy_tokens` for steps while the row cost is unknown."""
        average = self._cost.decode(0)
        if average is None or self._cost.token is None:
            return _FIRST_HEAVY_TOKENS
        return max(self._tokens_within((_FAIR_STRETCH - 1) * average), _FIRST_HEAVY_TOKENS)

    def _rows_within(self, seconds: float, fair_rows: int) -> int:
        """Return how many decode rows fit into `seconds`, at least `fair_rows`."""
        # At most twice the previous result: predictions for row counts far from the measured counts are unreliable.
        self._rows = int(min(max(self._cost.rows(seconds), fair_rows), max(2 * self._rows, fair_rows)))
        return self._rows
