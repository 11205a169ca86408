"""The agent loop for one prompt: request a model response, run its tool calls, repeat until there are no calls."""

import asyncio
import logging
from contextlib import aclosing

from helexa.acp.agent.answer import AnswerCollector
from helexa.acp.agent.compaction import compact
from helexa.acp.agent.prompt import read_notes
from helexa.acp.agent.request_builder import RequestBuilder
from helexa.acp.agent.tool_call_runner import Call, ToolCallRunner, parse_call
from helexa.acp.agent.turn import Turn
from helexa.acp.events import CallChanged, Notice, StopReason, UsageChanged
from helexa.acp.history import ToolKind, ToolResult
from helexa.acp.providers.provider import FinishReason, ModelCard, Provider, ProviderError, Usage

logger = logging.getLogger(__name__)

MAX_ROUNDS = 25
MAX_RETRIES = 10
MAX_BLIND_RETRIES = 3
"""Maximum number of retries if the endpoint does not send a retry delay."""

MAX_OVERFLOWS = 2
"""Maximum number of retries of one request after context-limit errors."""

MAX_WAIT_S = 60.0
MAX_TOTAL_WAIT_S = 120.0
"""Maximum total time in seconds between the attempts to get one response."""

_STOP: dict[FinishReason, StopReason] = {"length": "max_tokens", "refusal": "refusal"}


async def run_turn(turn: Turn) -> StopReason:
    """Let the agent work on the last message of the conversation until the model calls no more tools.

    The work consists of rounds. In each round, the model returns a response and the agent runs its tool calls.

    Raises:
        ProviderError: the endpoint returned no complete response. The partial response is stored in the history.
    """
    builder = RequestBuilder(turn, await read_notes(turn.context))
    for _ in range(MAX_ROUNDS):
        round = Round(turn)
        try:
            provider = await turn.models.provider(turn.choices.model)
            await _request_answer(turn, builder, round, provider)
        except ProviderError as error:
            logger.warning("turn failed: kind=%s error=%s", error.kind, error.message)
            await round.commit_partial()
            raise
        except asyncio.CancelledError:
            await round.commit_partial()
            raise
        await round.run_calls()
        usage, card = builder.usage(round.answer), turn.models.card(turn.choices.model)
        await turn.emit(UsageChanged(usage.input + usage.output, card.context, _cost(usage, card)))
        if not round.calls:
            return await _end(turn, round.answer)
    await turn.emit(Notice(f"The turn ended after {MAX_ROUNDS} rounds; send another prompt to continue.", "warning"))
    return "max_turn_requests"


class Round:
    """One round of the agent loop: a response of the model and the results of its tool calls."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        used = [call.id for message in turn.conversation.messages for call in getattr(message, "calls", ())]
        kinds: dict[str, ToolKind] = {tool.name: tool.kind for tool in turn.toolbox.tools(turn.choices.mode)}
        self.answer = AnswerCollector(turn.emit, kinds, used)
        self.calls: list[Call] = []

    async def run_calls(self) -> None:
        """Run the tool calls of the complete response, and append the response and the results to the history.

        On cancellation, unfinished calls get failed results. The response and all results are then appended too.
        """
        self.calls = [
            parse_call(call, self._turn, cut_off=self.answer.finish == "length") for call in self.answer.calls
        ]
        runner = ToolCallRunner(self._turn)
        try:
            await runner.run(self.calls)
        except asyncio.CancelledError:
            unsent_events = runner.cancel(self.calls)
            await self._commit(runner.results)
            for event in unsent_events:
                await self._turn.emit(event)
            raise
        await self._commit(runner.results)

    async def commit_partial(self) -> None:
        """Append the text received so far to the history. Tool calls are neither run nor appended."""
        message = self.answer.message(())
        if message is not None:
            await self._turn.conversation.commit(message)
        for call in self.answer.calls:
            if call.started:
                await self._turn.emit(CallChanged(call.id, "failed", output="The answer broke off."))

    async def _commit(self, results: dict[str, ToolResult]) -> None:
        message = self.answer.message(tuple(call.message for call in self.calls))
        if message is not None:
            ordered = [results[call.message.id] for call in self.calls]
            await self._turn.conversation.commit(message, *ordered)


async def _request_answer(turn: Turn, builder: RequestBuilder, round: Round, provider: Provider) -> None:
    """Request one model response and collect it in `round.answer`.

    After a temporary error, wait and retry. If the request exceeds the model's context, first let the model summarize
    the conversation.

    Raises:
        ProviderError: all retries failed, or the response ended before it was complete.
    """
    retries, waited_s, overflows, compacted = 0, 0.0, 0, False
    while True:
        request = builder.request(provider)
        if builder.overflows and not compacted:
            compacted = True
            if await compact(turn):
                continue
        builder.check()
        try:
            async with aclosing(provider.stream(request)) as events:
                await round.answer.read(events)
            builder.calibrate(round.answer.usage)
            return
        except ProviderError as error:
            if round.answer.begun:
                raise
            if error.kind == "context_limit" and overflows < MAX_OVERFLOWS:
                overflows += 1
                builder.learn(error)
                continue
            delay_s = _wait(error, retries)
            if delay_s is None or waited_s + delay_s > MAX_TOTAL_WAIT_S:
                raise
            retries, waited_s = retries + 1, waited_s + delay_s
            await turn.emit(Notice(f"{error.message}. Retrying in {delay_s:.0f} s.", "warning"))
            await asyncio.sleep(delay_s)


def _wait(error: ProviderError, retries: int) -> float | None:
    """Return the delay in seconds before the next attempt, or None if the request must not be retried.

    Args:
        error: the error of the last attempt.
        retries: number of retries so far.
    """
    if error.kind not in ("rate_limit", "unavailable", "interrupted"):
        return None
    if error.retry_after is None:
        return 2.0**retries if retries < MAX_BLIND_RETRIES else None
    return error.retry_after if error.retry_after <= MAX_WAIT_S and retries < MAX_RETRIES else None


async def _end(turn: Turn, answer: AnswerCollector) -> StopReason:
    if not answer.text.strip():
        reason = "it reached its token limit" if answer.finish == "length" else "it ended without text"
        await turn.emit(Notice(f"The model gave no answer: {reason}.", "warning"))
    return _STOP.get(answer.finish or "stop", "end_turn")


def _cost(usage: Usage, card: ModelCard) -> float | None:
    """Return the cost of one model response in US dollars, or None if the model's prices are unknown."""
    if card.input_price is None or card.output_price is None:
        return None
    cached_price = card.input_price if card.cached_price is None else card.cached_price
    uncached = max(0, usage.input - usage.cached)
    return (uncached * card.input_price + usage.cached * cached_price + usage.output * card.output_price) / 1e6
