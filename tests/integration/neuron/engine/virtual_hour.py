"""An hour of virtual time: mixed requests for a scheduler, and steps whose seconds follow a cost model."""

import random
from collections.abc import Iterator

import numpy as np

from helexa.neuron.engine.grammar_matcher import GrammarMatcher
from helexa.neuron.engine.ipc.messages import Generate, Logprob, SamplingParams, TokenOutput
from helexa.neuron.engine.scheduling.plan import Plan, PlanEntry, as_after
from helexa.neuron.engine.scheduling.scheduler import Scheduler
from helexa.neuron.engine.scheduling.sequence import Sequence
from helexa.neuron.engine.step_input_and_graph_sizes import Float32
from helexa.neuron.engine.step_output_logprobs_and_pooling import PooledVector
from helexa.neuron.ops.kernel_header import NON_FINITE

HOUR = 3600.0
STEP, ROW, TOKEN = 0.1, 0.04, 0.004
"""Seconds of a step, of a decode row and of a prompt token."""
FATAL, NOT_FINITE = 7, 8
"""A prompt token that makes steps fail, and one that makes results NaN."""
NAN = float("nan")


class SimulatedMatcher(GrammarMatcher):
    """A matcher of a grammar with `length` tokens.

    Every third run of five tokens is forced. If `fails` is true, the matcher fails halfway.
    """

    def __init__(self, length: int, fails: bool) -> None:
        self.error = ""
        self.bad_grammar = True
        self.ahead = 0
        self._length = length
        self._fails = fails
        self.position = 0

    @property
    def ended(self) -> bool:
        return self.position >= self._length

    def allowed(self, index: int, token: int) -> int:
        """Return the token at `index`: the forced token if there is one, else `token`."""
        return 60 + index % 5 if index // 5 % 3 == 2 else token

    def advance(self, token: int) -> None:
        self.position += 1
        if self._fails and 2 * self.position > self._length:
            self.error = "this text must not be in a log"

    def forced(self, limit: int) -> tuple[int, ...]:
        run = []
        while len(run) < limit and self.allowed(self.position + len(run), 0):
            run.append(self.allowed(self.position + len(run), 0))
        return tuple(run)

    def fitting(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        count = 0
        while count < len(drafts) and self.allowed(self.position + count, drafts[count]) == drafts[count]:
            count += 1
        return drafts[:count]


class VirtualHour:
    """Sends requests to a scheduler. Some steps fail, some results are NaN, and some requests are canceled.

    Args:
        seed: seed of the requests, failures and cancellations.
        noise_seed: seed of the noise in the measured seconds. Arrival times have no noise.
        overlap: plan a step before the previous step is committed, if possible.

    Attributes:
        plans: all plans, as tuples.
        outputs: last output of each request.
    """

    def __init__(self, scheduler: Scheduler, seed: int, noise_seed: int = 1, overlap: bool = False) -> None:
        self.scheduler = scheduler
        self.plans: list[tuple[tuple[object, ...], ...]] = []
        self.outputs: dict[int, TokenOutput] = {}
        self._chance = random.Random(seed)
        self._noise = random.Random(noise_seed)
        self._overlap = overlap
        self._requests = self._arrivals()
        self._arriving = next(self._requests)

    def run(self, steps: int = 10**9, seconds: float = HOUR) -> None:
        """Run until all requests that arrive within `seconds` have ended, for at most `steps` steps."""
        now, ahead = 0.0, Plan()
        while steps:
            steps -= 1
            plan = ahead or self._planned(self.scheduler.plan())
            ahead = Plan()
            if not plan:
                if self._arriving[0] > seconds:
                    break
                now = max(now, self._arriving[0])
            elif any(FATAL in entry.sequence.tokens for entry in plan) or self._chance.random() < 0.001:
                for output in self.scheduler.isolate(plan, "simulated failure"):
                    self.outputs[output.id] = output
            else:
                if self._overlap and self.scheduler.planner.may_plan_ahead(plan):
                    with as_after(plan):
                        ahead = self._planned(self.scheduler.plan_after())
                if ahead and self._chance.random() < 0.002:
                    self.scheduler.isolate(plan, "simulated failure", ahead)
                    ahead = Plan()
                    continue
                rows = sum(entry.sequence.decoding for entry in plan)
                cost = STEP + ROW * rows + TOKEN * sum(e.count for e in plan if not e.sequence.decoding)
                now += cost
                self._commit(plan, cost * (1 + 0.5 * self._noise.random()))
            while self._arriving[0] <= min(now, seconds):
                self.scheduler.add(self._arriving[1])
                self._arriving = next(self._requests)
            if self._chance.random() < 0.01:
                self.scheduler.cancel(self._chance.randrange(max(len(self.outputs), 1)))

    def _planned(self, plan: Plan) -> Plan:
        self.plans.append(tuple((e.sequence.id, e.count, e.drafts, tuple(e.sequence.pages)) for e in plan))
        return plan

    def _commit(self, plan: Plan, seconds: float) -> None:
        sampled = [token for entry in plan if entry.samples for token in self._sampled(entry)]
        scores: dict[int, list[Logprob]] = {}
        hidden: dict[int, Float32] = {}
        for entry in plan:
            sequence = entry.sequence
            value = NAN if NOT_FINITE in sequence.tokens else -1.0
            wanted = sequence.wanted(sequence.computed, sequence.computed + entry.count)
            if sequence.pooled is not None:
                hidden[sequence.id] = np.array([value], np.float32)
            elif wanted:
                scores[sequence.id] = [(value, [])] * len(wanted)
        for output in self.scheduler.commit(plan, sampled, seconds, {}, hidden, scores):
            self.outputs[output.id] = output

    def _sampled(self, entry: PlanEntry) -> Iterator[int]:
        """Yield the tokens of repetitive text, for which most drafts are right."""
        sequence = entry.sequence
        known = [*sequence.tokens[-12:], *entry.drafts]
        if isinstance(sequence.matcher, SimulatedMatcher):
            sequence.matcher.ahead = self._chance.randint(0, len(entry.drafts))
        for draft in range(len(entry.drafts) + 1):
            tokens = known[: len(known) - len(entry.drafts) + draft]
            token = tokens[-9 % len(tokens)] if sum(tokens[-3:]) % 7 else 10 + sum(tokens) % 40
            if isinstance(sequence.matcher, SimulatedMatcher):
                token = sequence.matcher.allowed(sequence.matcher.position + draft, token)
            yield NON_FINITE if NOT_FINITE in sequence.tokens else token

    def _arrivals(self) -> Iterator[tuple[float, Sequence]]:
        """Yield the arrival time and sequence of each request."""
        chance, at = self._chance, 0.0
        number = 0
        while True:
            at += chance.expovariate(0.3)
            length = chance.randrange(200, 2500) if chance.random() < 0.05 else chance.randrange(1, 120)
            prompt = [20 + number % 3] * chance.randrange(1, 60) + chance.choices(range(10, 50), k=length)
            if chance.random() < 0.02:
                prompt.insert(chance.randrange(len(prompt)), chance.choice((FATAL, NOT_FINITE)))
            kind = chance.random()
            request = Generate(
                id=number,
                prompt=prompt,
                max_tokens=0 if kind < 0.05 else chance.randrange(1, 90),
                sampling=SamplingParams(),
                stop_ids=[11],
                salt=chance.choice(("alice", "alice", "alice", "alice", "bob", "carol", "")),
                turn=chance.randrange(length),
                grammar="this text must not be in a log" if 0.1 < kind < 0.3 else "",
                prompt_logprobs=2 if kind < 0.05 else None,
                reports_start=kind > 0.9,
            )
            sequence = Sequence(request)
            if 0.05 < kind < 0.1:
                sequence.pooled = PooledVector("mean", len(prompt))
            elif request.grammar:
                sequence.matcher = SimulatedMatcher(chance.randrange(2, 60), fails=kind < 0.12)
            yield at, sequence
            number += 1
