"""Turns: what a step may carry when several principals have sequences, so that nobody waits for a heavy one's crowd.

A step advances all its sequences at once, so each waits for all the others. The measure is a step in which every
principal has as many sequences as the lightest one: a real one may take so many times as long, not more. Sequences that
do not fit into it take turns, one principal like another. Where rows cost next to nothing, all of them fit.

What steps take is foreseen roughly only, so one that took longer is followed by short ones, until they make up for it.

One principal alone is not held back at all.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from helexa.neuron.engine.pace import Pace
from helexa.neuron.engine.sequence import Sequence

_STRETCH = 1.6  # what a step may take, in steps of the measure
_BARE_EVERY = 8  # steps, one is without prompts of heavy principals, so that it is known what decoding takes,
_SMALL_EVERY = 16  # and one with as few rows as the measure has, to know what that takes
_LEAST = 16  # of them in a step that has any: a step with prompts has costs that do not depend on how many they are
_MOST_DEBT = 8.0  # in steps of the measure
_UNKNOWN = 8  # prompt tokens of heavy principals in a step, until it is known what they cost


@dataclass
class Ration:
    """What one step may carry.

    Attributes:
        rows: sequences that decode, at most; None for all.
        heavy: principals that have more sequences than the lightest.
        tokens: prompt tokens that these may have together.
        room: prompt tokens of everybody; None for no bound of this kind.
    """

    rows: int | None = None
    heavy: frozenset[str] = frozenset()
    tokens: int = 0
    room: int | None = None

    def tokens_for(self, sequence: Sequence) -> int:
        """Prompt tokens that a sequence may have."""
        return self.tokens if sequence.principal in self.heavy else sequence.pending

    def widen(self, cut: Sequence, tokens: int) -> None:
        """Let heavy principals have `tokens` beside the prompt of a light one that fills the step and is cut."""
        if cut.principal not in self.heavy:
            self.tokens = max(self.tokens, tokens)

    def take(self, sequence: Sequence, tokens: int) -> None:
        """Count what it got."""
        if sequence.principal in self.heavy:
            self.tokens -= tokens


@dataclass
class Turns:
    """Rations the steps of one engine, by what steps take.

    Attributes:
        pace: of prompts, as learned from the same steps.
    """

    pace: Pace
    _step: int = 0
    _most: int = 0
    _heavy: frozenset[str] = frozenset()
    _usual: float | None = None
    _debt: float = 0.0

    def ration(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> Ration:
        """What the next step may carry."""
        self._step += 1
        prompts = Counter(sequence.principal for sequence in running if not sequence.decoding)
        prompts.update(sequence.principal for sequence in waiting)
        present = prompts + Counter(sequence.principal for sequence in running if sequence.decoding)
        self._usual, self._heavy = None, frozenset()
        if len(present) < 2:
            self._debt = 0.0
            return Ration()
        lightest = min(present.values())
        measure = lightest * len(present)
        heavy = frozenset(principal for principal, count in present.items() if count > lightest)
        self._heavy = heavy
        usual = self.pace.cost.seconds(measure)
        self._usual = usual
        if self._step % _SMALL_EVERY == 0 or self._debt > 0:
            return Ration(measure, heavy)
        if usual is None:
            self._most = int(_STRETCH * measure)
            tokens = max(self.pace.beside(_STRETCH - 1), _UNKNOWN)
            return Ration(self._most, heavy, 0 if self._step % _BARE_EVERY == 0 else tokens)
        allowed = _STRETCH * usual
        if self._step % _BARE_EVERY == 0 or heavy.isdisjoint(prompts):
            return Ration(self._rows(allowed, measure), heavy, room=self.pace.tokens(usual))
        rows = self._rows((allowed + usual) / 2, measure)
        decoding = min(rows, sum(sequence.decoding for sequence in running))
        tokens = max(self.pace.tokens(allowed - (self.pace.cost.seconds(decoding) or usual)), _LEAST)
        return Ration(rows, heavy, tokens, self.pace.tokens(usual))

    def choose(self, decoding: list[Sequence], rows: int | None) -> list[Sequence]:
        """At most so many of them: each principal's that has waited longest, then each one's second, and so on."""
        chosen = decoding
        if rows is not None and len(decoding) > rows:
            places: Counter[str] = Counter()
            order: list[tuple[int, Sequence]] = []
            for sequence in sorted(decoding, key=lambda sequence: sequence.stepped):
                order.append((places[sequence.principal], sequence))
                places[sequence.principal] += 1
            order.sort(key=lambda pair: pair[0])
            picked = {sequence for _, sequence in order[:rows]}
            chosen = [sequence for sequence in decoding if sequence in picked]
        for sequence in chosen:
            sequence.stepped = self._step
        return chosen

    def learn(self, rows: int, prompts: Mapping[str, int], seconds: float) -> None:
        """Record a finished step.

        Args:
            rows: sequences that decoded in it.
            prompts: its prompt tokens by principal. Heavy principals do not owe the time of a light one's prompt.
        """
        if self._usual is not None:
            owed = min(seconds, self._usual) if prompts.keys() - self._heavy else seconds
            owed += self._debt - _STRETCH * self._usual
            self._debt = min(max(owed, 0.0), _MOST_DEBT * self._usual)
        if rows:
            self.pace.learn(rows, sum(prompts.values()), seconds)

    def _rows(self, seconds: float, measure: int) -> int:
        """Rows that fit into so many seconds; at most twice as many as before, since far off a line is a guess."""
        self._most = int(min(max(self.pace.cost.rows(seconds), measure), max(2 * self._most, measure)))
        return self._most
