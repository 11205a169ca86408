"""A simulated KV cache: it records the tokens and images that each slot was computed from, and replaces a model."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_output_logprobs_and_pooling import RejectionMasks, StepOutput

Contents = tuple[str, list[int], bytes]
"""The salt, the tokens and the images from which a KV slot or a recurrent state was computed."""


class SimulatedCache:
    """Runs plans: writes the slots that a model would write, and checks every slot that attention would read."""

    def __init__(self, scheduler: Scheduler, next_token: Callable[[list[int]], int] = lambda tokens: 9) -> None:
        self.scheduler = scheduler
        self.next_token = next_token
        self._slots: dict[tuple[int, int], Contents] = {}
        self._window_slots: dict[tuple[int, int], Contents] = {}
        self._states: dict[int, Contents] = {}

    def launch(self, plan: Plan, after: "SimulatedStep | None" = None, keep: bool = False) -> "SimulatedStep":
        """Run a plan whose unknown tokens come from the step `after`; return a step that is read later."""
        return SimulatedStep(self.run([_known(entry, after) for entry in plan]))

    def run(self, plan: Plan) -> list[int]:
        """Run one step; return the sampled tokens: for each sampling entry, one token plus one per draft."""
        size = self.scheduler.pages.page_size
        written: list[int] = []
        windows = self.scheduler.pages.windows
        if self.scheduler.states is not None:
            self._advance_states(plan)
        for entry in plan:
            sequence, tokens = entry.sequence, _tokens(entry)
            assert entry.count > 0, "a sequence without tokens is in the plan"
            for position in range(sequence.computed, len(tokens)):
                page = sequence.pages[position // size]
                written.append(page)
                self._slots[page, position % size] = self._contents(sequence, tokens[: position + 1])
                if windows is not None:
                    slot = int(windows.numbers[page]), position % size
                    self._window_slots[slot] = self._slots[page, position % size]
        for page in set(written):
            holders = sum(page in sequence.pages[sequence.unseen :] for sequence in self.scheduler.running)
            assert holders == 1, "a shared page was written"
        if windows is not None:
            numbers = windows.numbers[windows.numbers >= 0]
            assert len(set(numbers.tolist())) == len(numbers), "two pages have the same window page"
        for entry in plan:
            sequence, tokens, window = entry.sequence, _tokens(entry), self.scheduler.window
            first = 0 if window is None else max(sequence.computed - window + 1, 0)
            for position in range(first if windows is None else 0, len(tokens)):
                page, offset = sequence.pages[position // size], position % size
                expected = self._contents(sequence, tokens[: position + 1])
                found = self._slots[page, offset]
                assert found == expected, f"KV slot {page, offset} has {found} instead of {expected}"
                if windows is not None and position >= first:
                    found = self._window_slots[int(windows.numbers[page]), offset]
                    assert found == expected, f"the window page of {page} has {found} instead of {expected}"
        return [
            self.next_token(entry.sequence.tokens + list(entry.drafts[:accepted]))
            for entry in plan
            if entry.samples
            for accepted in range(len(entry.drafts) + 1)
        ]

    def _advance_states(self, plan: Plan) -> None:
        """Advance the state of each sequence by its tokens; check that the state is at the sequence's position."""
        for entry in plan:
            if entry.restore is not None:
                assert entry.sequence.slot is not None
                self._states[entry.sequence.slot] = self._states[entry.restore]
        slots = [entry.sequence.slot for entry in plan]
        assert None not in slots and len(set(slots)) == len(slots), "two sequences share a state slot"
        for entry in plan:
            sequence, slot = entry.sequence, entry.sequence.slot
            assert slot is not None
            if sequence.computed:
                expected = self._contents(sequence, sequence.tokens[: sequence.computed])
                assert self._states[slot] == expected, f"the state is that of {self._states[slot]}, not of {expected}"
            self._states[slot] = self._contents(sequence, sequence.tokens[: sequence.computed + entry.count])
        for entry in plan:
            if entry.save is not None and entry.sequence.slot is not None:
                self._states[entry.save] = self._states[entry.sequence.slot]

    def _contents(self, sequence: Sequence, tokens: list[int]) -> Contents:
        """Return the contents of the KV slot, or of the state, that follows the leading `tokens` of a sequence."""
        salt = sequence.request.salt if self.scheduler.options.prefix_reuse == "principal" else ""
        return salt, tokens, b"" if sequence.images is None else sequence.images.key(0, len(tokens))


@dataclass(frozen=True)
class SimulatedStep:
    """The result of a simulated step."""

    tokens: list[int]

    def read(self, rejection_masks: RejectionMasks) -> StepOutput:
        """Return the sampled tokens."""
        return StepOutput(self.tokens)


def _known(entry: PlanEntry, after: SimulatedStep | None) -> PlanEntry:
    """Return a copy of `entry` in which unknown tokens are replaced by the results of `after`."""
    sequence = copy(entry.sequence)
    sequence.tokens = [token if token >= 0 or after is None else after.tokens[token] for token in sequence.tokens]
    assert all(token >= 0 for token in sequence.tokens[: sequence.computed]), "an unknown token counts as computed"
    known = copy(entry)
    known.sequence = sequence
    return known


def _tokens(entry: PlanEntry) -> list[int]:
    """Return the tokens in the cache after the step."""
    return entry.sequence.tokens[: entry.sequence.computed + entry.count] + list(entry.drafts)
