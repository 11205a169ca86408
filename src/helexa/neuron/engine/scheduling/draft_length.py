"""Decides how many tokens to draft, and from where, by cost and acceptance.

The engine verifies drafts (predicted tokens) of a sequence in one step. Drafts come from n-gram lookup (see
`ngrams_and_counts`), or from a draft model: a smaller model with the same vocabulary. The gate (`DraftGate`) compares
the expected number of tokens per second for each number of drafts, from three measurements:

* the duration of a step by its number of rows (tokens)
* the duration of a pass of the draft model by its number of rows
* the acceptance: how many of the verified drafts were accepted, by source and sequence

Until measurements show a gain, the draft model runs only on credit. The credit grows by `_CREDIT_SHARE` of the time of
decode steps and by the time that accepted drafts save. A draft model that never helps therefore costs at most this
share of the time, and `_FIRST_CREDIT` steps once. If some drafts in a row are rejected and there is no gain, the gate
rests: it drafts nothing for a number of steps, then drafts again. If the next drafts are rejected, too, the next rest
is twice as long.

The draft model computes tokens of a sequence only when the sequence is about to draft. It then reads only the last
tokens of a long sequence. A long prompt therefore takes the draft model no longer than a short one, and the model's
prefill does not wait for the draft model.
"""

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass

# Maximum number of drafts of a draft model for one sequence in a step.
MOST_MODEL_DRAFTS = 3

# Maximum number of rows in a pass of the draft model.
MOST_DRAFT_ROWS = 128

# Numbers of drafts to choose from. With the last token, they fill 4 or 2 rows, to which native kernels pad a step.
_COUNTS = (3, 1)
# The draft model attends to at least the last `_LEAST_CONTEXT` tokens. It starts again near the end of a sequence of
# which it would have to compute more than `_MOST_MISSING` tokens.
_LEAST_CONTEXT, _MOST_MISSING = 32, 96
_CREDIT_SHARE = 0.01
_FIRST_CREDIT, _MOST_CREDIT = 8.0, 16.0  # in durations of a step without drafts
_TRIALS = 4  # steps with drafts for which the credit must suffice before the draft model computes missing tokens
# Numbers of verifications in a row without an accepted draft, after which the gate rests (see `_should_rest`).
_LEAST_REJECTED, _MOST_REJECTED = 4, 16
_FIRST_REST, _LONGEST_REST = 32, 512  # in steps
_LEAST_GAIN = 1.02  # minimum factor by which drafts must raise the tokens per second
_LEAST_TESTED = 8  # verified drafts before a gain counts as measured
_REFRESH_EVERY = 64  # number of steps with drafts after which one step has no drafts, so that its duration is measured

_PRIOR_NGRAM_ACCEPTANCE = 0.8  # assumed acceptance before measurements
# Assumed acceptance of a draft model before measurements. The assumption counts as `_PRIOR_WEIGHT` verified drafts. For
# a single sequence, the acceptance of all sequences counts as `_SEQUENCE_WEIGHT` verified drafts.
_PRIOR_ACCEPTANCE, _PRIOR_WEIGHT, _SEQUENCE_WEIGHT = 0.6, 4.0, 8.0
# Factors by which a verification reduces the weight of earlier verifications, in the acceptance of all sequences, and
# of a single sequence.
_MODEL_DECAY, _SEQUENCE_DECAY = 0.99, 0.95
# A pass counts as at most `_MOST_OUTLIER` times the average duration, because the machine may have been busy.
_EWMA_WEIGHT, _MOST_OUTLIER = 0.2, 2.0
_LEAST_MEASURED = 3  # number of passes with a row count after which its measured duration is certain
_OLD_AFTER = 512  # number of passes with other row counts after which the duration of a row count is old

# Assumed relative duration of a pass by its number of rows, until the duration is measured. The numbers are those of
# the native kernels with 4-bit weights.
_ROWS = (1, 2, 4, 6, 8, 16, 64)
_DURATIONS = (1.0, 1.05, 1.45, 2.2, 3.0, 5.5, 20.0)

# Weight of the growth of `_DURATIONS` in an average with the measured growth (see `PassCost._expected`). The measured
# growth has as weight the difference in `_DURATIONS` between the measured row counts.
_USUAL_GROWTH_WEIGHT = 1.0

# Nominal seconds with `step_timing = "fixed"`.
_FIXED_STEP, _FIXED_DRAFT = 0.01, 0.002


@dataclass(frozen=True)
class DraftLimits:
    """Properties of a draft model that limit its drafts."""

    context: int  # maximum number of positions of a sequence
    vocab_size: int  # number of tokens; a larger token id cannot be an input
    ratio: float  # bytes of the draft model's weights in a step, divided by those of the model
    is_head: bool = False  # whether the draft model is a draft head, which reads hidden states of the model


@dataclass
class _Duration:
    """Measured duration of a pass with one number of rows."""

    seconds: float
    count: int  # number of measurements
    last: int  # number of passes with any row count, up to the latest measurement


class PassCost:
    """Duration of a pass of a model by its number of rows.

    Args:
        seconds: assumed seconds of a pass with one row.
        fixed: whether the assumed duration is never replaced by measurements.
        optimistic: whether a row count with few or old measurements counts as no slower than the durations of other row
            counts suggest. The gate avoids row counts that look slow. Without optimism, it would never measure a row
            count again whose first measurement was slow by chance.
    """

    def __init__(self, seconds: float, fixed: bool, optimistic: bool = False) -> None:
        self._assumed, self._fixed, self._optimistic = seconds, fixed, optimistic
        self._measured: dict[int, _Duration] = {}
        self._rows: list[int] = []  # the measured row counts in ascending order
        self._passes = 0  # number of measured passes

    def seconds(self, rows: int) -> float:
        """Return the expected seconds of a pass with `rows` rows."""
        measured = self._measured.get(rows)
        if measured is None:
            return self._expected(rows, self._rows)
        # The gate cannot avoid the smallest row count, so this count is measured often.
        if not self._optimistic or self._is_certain(measured) or rows == self._rows[0]:
            return measured.seconds
        return min(measured.seconds, self._expected(rows, [known for known in self._rows if known != rows]))

    def learn(self, rows: int, seconds: float) -> None:
        """Record the duration of a pass."""
        if self._fixed:
            return
        self._passes += 1
        old = self._measured.get(rows)
        if old is None:
            self._rows.insert(bisect_left(self._rows, rows), rows)
        if old is None or self._passes - old.last > _OLD_AFTER:
            self._measured[rows] = _Duration(seconds, 1, self._passes)
            return
        if old.count < _LEAST_MEASURED:  # use the minimum of the first passes, because noise only lengthens a pass
            old.seconds = min(old.seconds, seconds)
        else:
            old.seconds += _EWMA_WEIGHT * (min(seconds, _MOST_OUTLIER * old.seconds) - old.seconds)
        old.count, old.last = old.count + 1, self._passes

    def _is_certain(self, measured: _Duration) -> bool:
        return measured.count >= _LEAST_MEASURED and self._passes - measured.last <= _OLD_AFTER

    def _expected(self, rows: int, known: list[int]) -> float:
        """Return the seconds of a pass, estimated from the passes with `known` row counts."""
        if not known:
            return self._assumed * _relative(rows)
        index = bisect_left(known, rows)
        if 0 < index < len(known):
            low, high = known[index - 1], known[index]
            share = (rows - low) / (high - low)
            return self._measured[low].seconds * (1 - share) + self._measured[high].seconds * share
        nearest = known[min(index, len(known) - 1)]
        seconds = self._measured[nearest].seconds
        if nearest == known[0]:
            return seconds * _relative(rows) / _relative(nearest)
        # `rows` is larger than all known row counts. The duration follows the curve of `_DURATIONS`, scaled to the
        # growth between the smallest and the largest known row count. Durations of few rows differ by less than their
        # noise, so the growth of the curve itself is averaged in.
        first = known[0]
        fewest = self._measured[first].seconds
        span, usual = _relative(nearest) - _relative(first), fewest / _relative(first)
        growth = (seconds - fewest + usual * _USUAL_GROWTH_WEIGHT) / (span + _USUAL_GROWTH_WEIGHT)
        return seconds + max(growth, 0.0) * (_relative(rows) - _relative(nearest))


class Acceptance:
    """Accepted share of the verified drafts. Later drafts weigh more.

    Args:
        decay: factor by which each recorded step reduces the weight of earlier steps.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.tested = self.accepted = 0.0

    def learn(self, drafted: int, accepted: int) -> None:
        """Record that `accepted` of `drafted` drafts were accepted in a step.

        Drafts after the first rejected draft do not count, because they were not verified.
        """
        self.tested = self.tested * self._decay + min(accepted + 1, drafted)
        self.accepted = self.accepted * self._decay + accepted

    def rate(self, prior: float, weight: float) -> float:
        """Return the acceptance as if `weight` more drafts had had the acceptance `prior`."""
        return (self.accepted + prior * weight) / (self.tested + weight)


class ModelDrafter:
    """What a draft model has computed of a sequence, and the acceptance of its drafts."""

    def __init__(self, gate: "DraftGate") -> None:
        self._gate = gate
        self.acceptance = Acceptance(_SEQUENCE_DECAY)
        self.debt = 0.0  # seconds that the draft model has spent on missing tokens of the sequence so far
        self.forget()

    def forget(self) -> None:
        """Forget what is computed, because the sequence has released its pages."""
        # The draft model has computed K and V of the positions from `start` to `end` - 1. It attends to no positions
        # before `start`, where a page begins.
        self.start = self.end = 0
        self.marked = 0  # number of leading pages of the sequence that are in `PagePool.drafted`, or before `start`
        self.passes = 0  # number of passes of the draft model for the drafts of the planned step

    def missing(self, length: int) -> int:
        """Return how many tokens of a sequence of `length` the draft model must compute."""
        return length - self.end

    def prepare(self, length: int) -> bool:
        """Return whether drafts for a sequence of `length` tokens are possible.

        Draft heads override this method.
        """
        return True

    def learn(self, drafted: int, accepted: int) -> None:
        """Record how many of the drafts in a step were accepted, and advance `end`."""
        # The last pass yields a draft, but does not compute K and V of this draft.
        self.end += min(accepted, max(self.passes - 1, 0))
        if drafted:
            self.acceptance.learn(drafted, accepted)
            self._gate.learn_result(drafted, accepted)


@dataclass(frozen=True)
class Candidate:
    """A decoding sequence for which the draft model may predict tokens."""

    drafter: ModelDrafter
    missing: int  # number of tokens that the draft model must compute for the first draft
    limit: int  # maximum number of drafts
    generated: int  # number of output tokens of the sequence


def first_position(length: int, page_size: int) -> int:
    """Return the first position that a draft model computes of `length` positions.

    A draft model reads only the last positions of a long sequence, from the start of a page.
    """
    return max(length - _LEAST_CONTEXT, 0) // page_size * page_size


def is_behind(length: int, end: int) -> bool:
    """Return whether a draft model lacks too many tokens of a sequence to catch up.

    Args:
        length: number of tokens of the sequence.
        end: position after the last token that the draft model has computed.
    """
    return length - end > _MOST_MISSING


class DraftGate:
    """Chooses the number of drafts in each step (see the module).

    Args:
        ratio: bytes of the draft model's weights divided by those of the model, from which the duration of a pass is
            assumed until it is measured. Without a draft model, `ratio` has no effect.
        fixed: whether durations are nominal, so that the same requests get the same plans.
    """

    def __init__(self, ratio: float = 1.0, fixed: bool = False) -> None:
        # Only the estimates for steps are optimistic: a row count that was seldom measured may count as faster than its
        # measurements. A pass of the draft model has up to 128 rows, so a wrong estimate would cost too much. Passes
        # with few rows are measured again and again without optimism, because `_credit` pays for them.
        self._step = PassCost(_FIXED_STEP, fixed, optimistic=True)
        self._pass = PassCost(_FIXED_DRAFT if fixed else _FIXED_STEP * ratio, fixed)
        self._ratio, self._fixed = ratio, fixed
        self._acceptance = Acceptance(_MODEL_DECAY)
        # seconds that drafts without a measured gain may cost; None until the duration of a step is known
        self._credit: float | None = None
        self._sequences = 1  # number of decoding sequences in the last step
        self._in_a_row = 0  # number of steps since the last step without drafts
        self._rejected = 0  # number of verifications in a row without an accepted draft
        self._rest, self._next_rest = 0, _FIRST_REST  # steps left in the current rest, and steps of the next rest
        self.gain = 1.0  # estimated tokens per second in the last decode steps, divided by the estimate without drafts

    @property
    def rests(self) -> bool:
        """Whether the next steps get no drafts of the draft model."""
        return self._rest > 0

    def choose(self, candidates: Collection[Candidate], rows: int) -> tuple[int, list[ModelDrafter]]:
        """Return the number of drafts per sequence, and the drafters; (0, []) for none.

        Args:
            candidates: the sequences that may draft.
            rows: number of rows of the step without drafts of the draft model.
        """
        self._sequences = max(len(candidates), 1)
        if self._credit is None:  # the first steps measure the duration of a step without drafts
            return 0, []
        self._in_a_row += 1
        if self._in_a_row > _REFRESH_EVERY:
            self._in_a_row = 0
            return 0, []
        gains = self._acceptance.tested >= _LEAST_TESTED
        chosen: list[Candidate] = []
        budget = MOST_DRAFT_ROWS
        for candidate in candidates:
            if candidate.missing <= budget and (self._is_ready(candidate) or self._may_catch_up(candidate, gains)):
                chosen.append(candidate)
                budget -= candidate.missing
        best, best_gain = 0, _LEAST_GAIN
        for count in _COUNTS if chosen and gains else ():
            if (gain := self._gain(chosen, count, rows)) > best_gain:
                best, best_gain = count, gain
        if best:
            self._learn_gain(best_gain)
            self._next_rest = _FIRST_REST
        elif self._should_rest():
            self._begin_rest()
        elif chosen and self._credit >= (cost := self._cost(chosen, 1, rows)):
            self._credit -= cost
            best = 1
        if not best:
            self._in_a_row = 0
            self._learn_gain(1.0)
            return 0, []
        for candidate in chosen:
            if not self._is_ready(candidate):
                candidate.drafter.debt += self._pass.seconds(candidate.missing)
        return best, [candidate.drafter for candidate in chosen]

    def ngram_drafts(self, acceptance: Acceptance, most: int, rows: int, sequences: int) -> tuple[int, float]:
        """Return how many of `most` n-gram drafts of a sequence to verify, and their gain.

        The gain is the factor by which these drafts raise the tokens per second of the step; 1.0 if no gain is known.
        If no number of drafts has a gain, a single draft may be verified on credit.

        Args:
            acceptance: acceptance of earlier n-gram drafts of the sequence.
            rows: number of rows of the step without these drafts.
            sequences: number of decoding sequences in the step.
        """
        if self._credit is None:
            return most, 1.0  # durations are not known yet
        rate = acceptance.rate(_PRIOR_NGRAM_ACCEPTANCE, _PRIOR_WEIGHT)
        plain = self._step.seconds(rows)
        gains: dict[int, float] = {}
        for count in (1, 3, most):
            tokens = 1 + (_tokens(rate, min(count, most)) - 1) / sequences
            gains[min(count, most)] = tokens * plain / self._step.seconds(rows + min(count, most))
        # A repetition that continues is usually long, so fewer drafts are chosen only if `most` drafts bring no gain.
        best = most if gains[most] > 1.0 else max(gains, key=lambda count: gains[count])
        if gains[best] > 1.0:
            return best, gains[best]
        # Without a gain, a single draft is verified on credit, because the acceptance must still be measured.
        cost = self._step.seconds(rows + 1) - plain
        if most and self._credit > cost:
            self._credit -= cost
            return 1, 1.0
        return 0, 1.0

    def prefers_model(self, drafter: ModelDrafter, missing: int, gain: float) -> bool:
        """Return whether the draft model is known to gain more than n-gram drafts.

        Args:
            missing: number of tokens that the draft model must compute for the first draft.
            gain: gain of the n-gram drafts (see `ngram_drafts`).
        """
        if missing > MOST_MODEL_DRAFTS + 1 or self._acceptance.tested < _LEAST_TESTED:
            return False
        rate = self._rate(drafter)
        return max(self._speedup(rate, count) for count in _COUNTS) > gain

    def learn_step(self, rows: int, seconds: float) -> None:
        """Record the duration of a step without prompt tokens.

        Args:
            rows: number of rows of the step, with drafts.
        """
        if self._fixed:
            seconds = self._step.seconds(rows)
        self._step.learn(rows, seconds)
        if self._credit is None:
            self._credit = _FIRST_CREDIT * seconds
            if not self._fixed:
                self._pass = PassCost(self._step.seconds(1) * self._ratio, fixed=False)
        self._add_credit(_CREDIT_SHARE * seconds)
        if self._rest:
            self._rest -= 1
            self._learn_gain(1.0)

    def learn_pass(self, rows: int, seconds: float) -> None:
        """Record the duration of a pass of the draft model with `rows` rows."""
        self._pass.learn(rows, seconds)

    def learn_result(self, drafted: int, accepted: int) -> None:
        """Record how many of the drafts of a sequence were accepted in a step."""
        self._acceptance.learn(drafted, accepted)
        self._rejected = 0 if accepted else self._rejected + 1
        self._add_credit(accepted * self._step.seconds(self._sequences) / self._sequences)

    def _begin_rest(self) -> None:
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        self._rejected = 0

    def _should_rest(self) -> bool:
        """Return whether so many drafts were rejected that the gate must rest."""
        # If the acceptance was high before, a few rejections start no rest, because the draft model falls behind during
        # a rest.
        gain = self._speedup(self._acceptance.rate(_PRIOR_ACCEPTANCE, _PRIOR_WEIGHT / 2), 1)
        return self._rejected >= _MOST_REJECTED or (self._rejected >= _LEAST_REJECTED and gain < 1.0)

    def _trial_seconds(self) -> float:
        """Return the seconds by which one draft of one sequence lengthens a step."""
        return self._pass.seconds(1) + max(self._step.seconds(2) - self._step.seconds(1), 0.0)

    def _add_credit(self, seconds: float) -> None:
        if self._credit is not None:
            self._credit = min(self._credit + seconds, _MOST_CREDIT * self._step.seconds(1))

    def _is_ready(self, candidate: Candidate) -> bool:
        return candidate.missing <= MOST_MODEL_DRAFTS + 1

    def _may_catch_up(self, candidate: Candidate, gains: bool) -> bool:
        """Return whether the draft model may compute the missing tokens of a sequence.

        The rule is that of the ski rental problem: the computation is allowed if drafts would have saved as much time
        in the output so far as the computation costs. It is also allowed if the credit pays for it.

        Args:
            gains: whether enough drafts were verified to measure the gain of drafts.
        """
        cost = self._pass.seconds(candidate.missing)
        if gains:
            rate = self._rate(candidate.drafter)
            gain = max(self._speedup(rate, count) for count in _COUNTS)
            saved = (1 - 1 / gain) * candidate.generated * self._step.seconds(1)
            if gain > _LEAST_GAIN and saved >= candidate.drafter.debt + cost:
                return True
        return self._credit is not None and self._credit >= cost + _TRIALS * self._trial_seconds()

    def _rate(self, drafter: ModelDrafter) -> float:
        return drafter.acceptance.rate(self._acceptance.rate(_PRIOR_ACCEPTANCE, _PRIOR_WEIGHT), _SEQUENCE_WEIGHT)

    def _speedup(self, rate: float, count: int) -> float:
        """Return the gain of `count` drafts for one sequence with the acceptance `rate`."""
        seconds = self._step.seconds(count + 1) + count * self._pass.seconds(1)
        return _tokens(rate, count) * self._step.seconds(1) / seconds

    def _gain(self, chosen: Collection[Candidate], count: int, rows: int) -> float:
        """Return the factor by which `count` drafts per sequence raise tokens per second.

        Only the sequences in `chosen` have drafts, each at most its `limit`.
        """
        others = max(self._sequences - len(chosen), 0)
        tokens = others + sum(_tokens(self._rate(each.drafter), min(count, each.limit)) for each in chosen)
        plain = self._step.seconds(rows)
        # The cost of missing tokens is left out. `_may_catch_up` has accepted it, because it pays in later steps.
        return tokens / self._sequences * plain / (plain + self._cost(chosen, count, rows, caught_up=True))

    def _cost(self, chosen: Collection[Candidate], count: int, rows: int, caught_up: bool = False) -> float:
        """Return the seconds by which drafts lengthen a step with `rows` rows.

        Args:
            count: number of drafts of each sequence in `chosen`, at least 1; a sequence has at most its `limit`.
            caught_up: whether to leave out the cost of tokens that the draft model still has to compute.
        """
        drafts = sum(min(count, each.limit) for each in chosen)
        missing = sum(1 if caught_up else each.missing for each in chosen)
        verification = max(self._step.seconds(rows + drafts) - self._step.seconds(rows), 0.0)
        return verification + self._pass.seconds(missing) + (count - 1) * self._pass.seconds(len(chosen))

    def _learn_gain(self, gain: float) -> None:
        self.gain += _EWMA_WEIGHT * (gain - self.gain)


def _tokens(rate: float, count: int) -> float:
    """Return the expected tokens of a sequence in a step with `count` drafts."""
    return sum(rate**index for index in range(count + 1))


def _relative(rows: int) -> float:
    index = bisect_left(_ROWS, rows)
    if index == len(_ROWS):
        return _DURATIONS[-1] * rows / _ROWS[-1]
    if _ROWS[index] == rows:
        return _DURATIONS[index]
    low, high = _ROWS[index - 1], _ROWS[index]
    share = (rows - low) / (high - low)
    return _DURATIONS[index - 1] * (1 - share) + _DURATIONS[index] * share
