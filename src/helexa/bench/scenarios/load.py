"""Scenarios of many requests: concurrency, rate, mixed sizes, conversations."""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from helexa.bench.prompts_and_load_generators import (
    Arrivals,
    PromptRequest,
    Turn,
    arrival_times,
    closed_loop,
    open_loop,
)
from helexa.bench.request_records_and_metrics import Objectives, RequestRecord
from helexa.bench.scenarios.scenario import Outcome, Scenario, Subject, first_failure, text_objectives

_PROBE_TOKENS = 32
_PROBES_RPS = 2.0
_SPREAD = 0.5  # standard deviation of the logarithm of sizes and times in conversations


@dataclass(frozen=True, slots=True)
class Concurrency(Scenario):
    """Closed loop: `level` users, who wait for a response before the next request.

    No prompt hits the prefix cache.
    """

    kind: ClassVar[str] = "concurrency"

    level: int
    duration_secs: float
    prompt_tokens: int
    max_tokens: int
    objectives: Objectives

    def _name(self) -> str:
        return f"concurrency:{self.level}"

    def _params(self) -> dict[str, Any]:
        return {"concurrency": self.level, **_load_params(self)}

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send requests for `duration_secs`, with `level` requests in flight."""
        ask = subject.cold_requests(subject.prompts(seed), self.prompt_tokens, self.max_tokens)
        records = await closed_loop(ask, self.level, self.duration_secs, subject.clock)
        return Outcome(
            records, error=load_failure(records), objectives=self.objectives, columns={"concurrency": self.level}
        )


@dataclass(frozen=True, slots=True)
class Rate(Scenario):
    """Open loop: requests at a given rate, even if responses are late.

    No prompt hits the prefix cache.

    A closed loop would send fewer requests to a slow server, so that its tail latencies would look too low.
    """

    kind: ClassVar[str] = "rate"

    rate_rps: float
    arrivals: Arrivals
    duration_secs: float
    prompt_tokens: int
    max_tokens: int
    objectives: Objectives

    def _name(self) -> str:
        return f"rate:{self.arrivals}:{self.rate_rps:g}"

    def _params(self) -> dict[str, Any]:
        return {"rate_rps": self.rate_rps, "arrivals": self.arrivals, **_load_params(self)}

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send each request at its scheduled time, and stop early if the server saturates."""
        ask = subject.cold_requests(subject.prompts(seed), self.prompt_tokens, self.max_tokens)
        offsets = list(arrival_times(self.rate_rps, self.duration_secs, self.arrivals, seed))
        loop = await open_loop(ask, offsets, subject.clock)
        answered = any(record.status == "ok" for record in loop.records)
        return Outcome(
            loop.records,
            # The failures of a saturated server show its limit, so the sample is valid.
            error=None if loop.saturated and answered else load_failure(loop.records),
            saturated=loop.saturated,
            objectives=self.objectives,
            columns={"rate_rps": self.rate_rps},
        )


def _load_params(scenario: Concurrency | Rate) -> dict[str, Any]:
    return {
        "duration_s": scenario.duration_secs,
        "prompt_tokens": scenario.prompt_tokens,
        "max_tokens": scenario.max_tokens,
        "objectives": text_objectives(scenario.objectives),
        "cache": "cold",
    }


@dataclass(frozen=True, slots=True)
class Mixed(Scenario):
    """Long requests as load, and requests for one token (probes) at a fixed rate.

    Only the probes are measured. Their latency shows how fairly the server schedules its requests.
    """

    kind: ClassVar[str] = "mixed"

    prompt_tokens: int
    duration_secs: float
    max_tokens: int

    def _name(self) -> str:
        return f"mixed:{self.prompt_tokens}"

    def _params(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "duration_s": self.duration_secs,
            "max_tokens": self.max_tokens,
            "probe_tokens": _PROBE_TOKENS,
            "probes_rps": _PROBES_RPS,
            "cache": "cold",
        }

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Send long requests one after the other, and probes at the same time."""
        prompts = subject.prompts(seed)
        load = subject.cold_requests(prompts, self.prompt_tokens, self.max_tokens)

        async def probe(scheduled: float | None) -> RequestRecord:
            question = PromptRequest(subject.model.name, prompts.cold(_PROBE_TOKENS), max_tokens=1)
            return await subject.client.ask(question, scheduled=scheduled, role="probe")

        offsets = list(arrival_times(_PROBES_RPS, self.duration_secs, "constant", seed))
        async with asyncio.TaskGroup() as group:
            long = group.create_task(closed_loop(load, 1, self.duration_secs, subject.clock))
            probes = group.create_task(open_loop(probe, offsets, subject.clock))
        measured = probes.result().records
        return Outcome(
            sorted([*long.result(), *measured], key=lambda record: record.sent),
            measured=measured,
            # If the long requests fail, the probes were measured without load.
            error=load_failure(long.result()) or load_failure(measured),
            columns={"concurrency": 1},
        )


@dataclass(frozen=True, slots=True)
class Agentic(Scenario):
    """Concurrent conversations like those of coding agents.

    Each request of a conversation contains all earlier messages. Sizes of tool results and durations of tools are
    random, with lognormal distributions around the given medians.
    """

    kind: ClassVar[str] = "agentic"

    conversations: int
    turns: int
    system_tokens: int
    tool_tokens: int
    tool_secs: float
    max_tokens: int

    def _name(self) -> str:
        return f"agentic:warm:{self.conversations}x{self.turns}"

    def _params(self) -> dict[str, Any]:
        return {
            "conversations": self.conversations,
            "turns": self.turns,
            "system_tokens": self.system_tokens,
            "tool_tokens": self.tool_tokens,
            "tool_s": self.tool_secs,
            "max_tokens": self.max_tokens,
            "cache": "warm",
        }

    def _tokens(self) -> tuple[int, int]:
        # The mean of the lognormal sizes is 1.13 times their median. 1.2 also accounts for markup.
        turn = 1.2 * self.tool_tokens + self.max_tokens
        return self.system_tokens + math.ceil(turn * self.turns), self.max_tokens

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Run all conversations to their end."""
        system = Turn("system", subject.prompts(seed).prefix(self.system_tokens))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._converse(subject, system, f"{seed}:{number}"))
                for number in range(self.conversations)
            ]
        records = sorted((record for task in tasks for record in task.result()), key=lambda record: record.sent)
        # A conversation ends at its first failure, so its later and longer requests are missing. Without them, the
        # sample would look too fast. Therefore any failure makes the sample invalid.
        return Outcome(records, error=first_failure(records), columns={"concurrency": self.conversations})

    async def _converse(self, subject: Subject, system: Turn, seed: str) -> list[RequestRecord]:
        source = random.Random(seed)
        prompts = subject.prompts(source.getrandbits(53))
        turns = [system, Turn("user", f"{prompts.prefix(self.tool_tokens)}\n\nBegin.")]
        records: list[RequestRecord] = []
        while True:
            question = PromptRequest(subject.model.name, list(turns), self.max_tokens)
            record = await subject.client.ask(question, role="turn")
            records.append(record)
            if record.status != "ok" or len(records) == self.turns:
                return records  # the request failed, or it was the last turn
            returned = prompts.words(round(self.tool_tokens * source.lognormvariate(0, _SPREAD)))
            turns += [Turn("assistant", record.text or "..."), Turn("user", f"The tool returned: {returned}")]
            took = self.tool_secs * source.lognormvariate(0, _SPREAD)
            await subject.clock.sleep_until(subject.clock.now() + took)


MOST_FAILURES = 0.05
"""Largest share of failed requests in a valid sample.

Requests rejected by an overloaded server do not count as failed.
"""


def load_failure(records: Sequence[RequestRecord]) -> str | None:
    """Return why a sample of many requests is invalid, or None if it is valid.

    A sample is invalid if no request succeeded or more than 5 % of the requests failed.
    """
    failed = [record for record in records if record.status in ("error", "timeout", "incomplete")]
    if not any(record.status == "ok" for record in records):
        return first_failure(records)
    if len(failed) > MOST_FAILURES * len(records):
        return f"{len(failed)} of {len(records)} requests failed; the first error is {first_failure(failed)}"
    return None
