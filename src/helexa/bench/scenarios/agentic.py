"""Conversations that imitate coding agents: a long system prompt, many requests, and pauses for tools."""

import asyncio
import math
import random
from dataclasses import dataclass
from typing import ClassVar

from helexa.bench.identity import ScenarioKey
from helexa.bench.measurement.prompt_request import PromptRequest, Turn
from helexa.bench.measurement.request_record import RequestRecord
from helexa.bench.scenarios.scenario import Outcome, Subject, first_failure, fits
from helexa.bench.targets.target import Control, ServedModel

_SPREAD = 0.5  # standard deviation of the logarithm of sizes and times


@dataclass(frozen=True, slots=True)
class Agentic:
    """Several concurrent conversations with a common system prompt.

    Each request of a conversation contains all earlier messages. Sizes of tool results and durations of tools are
    random, with lognormal distributions around the given medians.
    """

    warms_up: ClassVar[bool] = True

    conversations: int
    turns: int
    system_tokens: int
    tool_tokens: int
    tool_secs: float
    max_tokens: int

    @property
    def key(self) -> ScenarioKey:
        """Name and parameters that identify the scenario in the database."""
        params = {
            "conversations": self.conversations,
            "turns": self.turns,
            "system_tokens": self.system_tokens,
            "tool_tokens": self.tool_tokens,
            "tool_s": self.tool_secs,
            "max_tokens": self.max_tokens,
            "cache": "warm",
        }
        return ScenarioKey(f"agentic:warm:{self.conversations}x{self.turns}", "agentic", params)

    def suits(self, model: ServedModel, control: Control | None) -> bool:
        """Return whether the model generates text and its context is long enough for a whole conversation."""
        turn = 1.2 * self.tool_tokens + self.max_tokens
        return fits(model, self.system_tokens + math.ceil(turn * self.turns), self.max_tokens)

    async def run(self, subject: Subject, seed: int) -> Outcome:
        """Run all conversations to their end.

        If a request fails, the sample is invalid. Without the longer requests at the end of a conversation, the sample
        would look too fast.
        """
        system = Turn("system", subject.prompts(seed).prefix(self.system_tokens))
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._converse(subject, system, f"{seed}:{number}"))
                for number in range(self.conversations)
            ]
        records = sorted((record for task in tasks for record in task.result()), key=lambda record: record.sent)
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
                return records  # failed, or the last turn
            returned = prompts.words(round(self.tool_tokens * source.lognormvariate(0, _SPREAD)))
            turns += [Turn("assistant", record.text or "..."), Turn("user", f"The tool returned: {returned}")]
            took = self.tool_secs * source.lognormvariate(0, _SPREAD)
            await subject.clock.sleep_until(subject.clock.now() + took)
