"""Replay a plan log: give the logged inputs to a new scheduler, and compare its plans with the logged plans.

usage: python -m plan_log.replay FILE

If all plans are equal, prints their number. Otherwise prints the first plan that differs, with exit status 1.
"""

import argparse
import sys
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from helexa.neuron.engine.grammar_matcher import GrammarMatcher
from helexa.neuron.engine.ipc.messages import Cancel
from helexa.neuron.engine.scheduling.plan import Plan, as_after
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_output_logprobs_and_pooling import PooledVector
from plan_log.records import Added, Failed, Finished, GrammarResult, Planned, PlannedEntry, Setup, read

_NAN = float("nan")


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        plans: number of plans that were compared.
        recorded: the first logged plan that differs from the replayed plan; None if all plans are equal.
        replayed: the replayed plan that differs from `recorded`; None if all plans are equal.
    """

    plans: int
    recorded: Planned | None = None
    replayed: Planned | None = None


def replay(path: Path) -> Replay:
    """Replay the log file `path` up to its end, or up to the first plan that differs from the logged plan.

    Raises:
        OSError: the file cannot be read.
        msgspec.DecodeError: the file is not a plan log.
    """
    records = read(path)
    setup = next(records, None)
    if not isinstance(setup, Setup):
        raise msgspec.DecodeError("no setup in the first record")
    repeated = _Repeated(setup)
    plans = 0
    for record in records:
        match record:
            case Added():
                repeated.add(record)
            case Cancel():
                repeated.scheduler.cancel(record.id)
            case Planned():
                plans += 1
                if (replayed := repeated.plan(record)) != record:
                    return Replay(plans, record, replayed)
            case Finished():
                repeated.finish(record)
            case Failed():
                repeated.fail()
            case Setup():
                raise msgspec.DecodeError("a second setup")
    return Replay(plans)


class _Repeated:
    """The scheduler of a replay, and the plans that are not committed yet."""

    def __init__(self, setup: Setup) -> None:
        self.scheduler = Scheduler(*setup.arguments())
        self._matchers: dict[int, _RecordedMatcher] = {}
        self._launched: deque[Plan] = deque()

    def add(self, record: Added) -> None:
        """Add the request in `record` to the scheduler."""
        request = record.request
        sequence = Sequence(request, pooled=PooledVector("last", len(request.prompt)) if record.pooled else None)
        if record.guided:
            sequence.matcher = self._matchers[request.id] = _RecordedMatcher()
        self.scheduler.add(sequence)

    def plan(self, record: Planned) -> Planned:
        """Let the scheduler make its next plan, and return the record of this plan.

        Args:
            record: the logged record of the same plan. It says which scheduler method made the plan, and which drafts
                came from grammars.
        """
        for entry in record.entries:
            if entry.id in self._matchers:
                self._matchers[entry.id].planned = entry
        with as_after(self._launched[0]) if record.ahead else nullcontext():
            plan = self.scheduler.plan_after() if record.ahead else self.scheduler.plan()
            replayed = Planned.from_plan(plan, ahead=record.ahead)
        if plan:
            self._launched.append(plan)
        return replayed

    def finish(self, record: Finished) -> None:
        """Commit the oldest plan in flight with the results in `record`."""
        plan = self._launched.popleft()
        for result in record.grammars:
            self._matchers[result.id].take(result)
        pooled = [entry.sequence.id for entry in plan if entry.sequence.pooled is not None]
        hidden = {number: np.array([_NAN if number in record.not_finite else 1.0], np.float32) for number in pooled}
        self.scheduler.commit(
            plan, record.sampled, record.seconds, {}, hidden, {number: [(_NAN, [])] for number in record.not_finite}
        )

    def fail(self) -> None:
        """Handle a failure of the oldest step in flight, as `Scheduler.isolate` does.

        The plan of the step that was launched after it is dropped.
        """
        plan = self._launched.popleft()
        self.scheduler.isolate(plan, "", self._launched.popleft() if self._launched else None)


class _RecordedMatcher(GrammarMatcher):
    """Replaces a sequence's grammar matcher in a replay. It returns the logged results instead of matching a grammar.

    Attributes:
        planned: the logged entry of the sequence in the plan that the scheduler makes next; None before the first plan.
    """

    def __init__(self) -> None:
        self.error = ""
        self.bad_grammar = False
        self.ahead = 0
        self.planned: PlannedEntry | None = None
        self._result: GrammarResult | None = None
        self._advanced = 0

    @property
    def ended(self) -> bool:
        return self._result is not None and self._result.ended and self._advanced == self._result.kept

    def take(self, result: GrammarResult) -> None:
        """Set the logged result of the step that is committed next."""
        self._result, self._advanced, self.ahead = result, 0, result.ahead
        self.error = "recorded" if result.failed else ""

    def advance(self, token: int) -> None:
        self._advanced += 1

    def forced(self, limit: int) -> tuple[int, ...]:
        return self.planned.drafts[:limit] if self.planned is not None and not self.planned.guessed else ()

    def fitting(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        return drafts[: len(self.planned.drafts)] if self.planned is not None and self.planned.guessed else ()


def main() -> None:
    """Replay the log file named on the command line, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    try:
        outcome = replay(path)
    except (OSError, msgspec.DecodeError) as error:
        sys.exit(f"{path} cannot be replayed: {error}")
    if outcome.recorded is None or outcome.replayed is None:
        print(f"{outcome.plans} plans are identical")
        return
    print(f"plan {outcome.plans} differs")
    pairs = dict.fromkeys((*outcome.recorded.entries, *outcome.replayed.entries))
    for entry in pairs:
        recorded, replayed = entry in outcome.recorded.entries, entry in outcome.replayed.entries
        if recorded != replayed:
            print(f"{'recorded' if recorded else 'replayed'}: {entry}")
    sys.exit(1)


if __name__ == "__main__":
    main()
