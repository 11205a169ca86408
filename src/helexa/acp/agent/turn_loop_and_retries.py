"""The agent loop for one prompt: request a response, run its calls, repeat."""

import asyncio
import logging
from contextlib import aclosing

from helexa.acp.agent.answer import AnswerCollector
from helexa.acp.agent.context_and_compaction import Turn, compact
from helexa.acp.agent.system_prompt_and_request import RequestBuilder, trusted_notes
from helexa.acp.agent.tool_calls import Call, ToolCallRunner, parse_call
from helexa.acp.conversation_and_events import CallChanged, Notice, StopReason, ToolKind, ToolResult, UsageChanged
from helexa.acp.providers.models import ModelCard, Provider
from helexa.acp.providers.requests_and_events import FinishReason, ProviderError, Usage

logger = logging.getLogger(__name__)

MAX_RETRIES = 10
MAX_BLIND_RETRIES = 3  # maximum number of retries if the endpoint does not send a retry delay

MAX_OVERFLOWS = 2  # maximum number of retries of one request after context-limit errors

MAX_WAIT_S = 60.0
MAX_TOTAL_WAIT_S = 120.0  # maximum sum of the pauses between the attempts to get one response, in seconds

_STOP: dict[FinishReason, StopReason] = {"length": "max_tokens", "refusal": "refusal"}


async def run_turn(turn: Turn) -> StopReason:
    """Let the agent work on the prompt, the last message of `turn.messages`.

    Return why the turn ended, for example because the model called no more tools or `max_rounds` rounds have passed.
    After each round, the response and the results of its calls are appended to the history. On cancellation, unfinished
    calls get failed results.

    Raises:
        ProviderError: the endpoint returned no complete response. The partial response is stored in the history.
        StoreError: `turn.commit` or `turn.emit` could not write to disk.
    """
    builder = RequestBuilder(turn, await trusted_notes(turn))
    for _ in range(turn.settings.max_rounds):
        current = Round(turn)
        try:
            provider = await turn.models.provider(turn.choices.model)
            await _request_answer(turn, builder, current, provider)
        except ProviderError as error:
            logger.warning(
                "turn failed model=%s kind=%s error=%r; the editor shows this error",
                turn.choices.model,
                error.kind,
                error.message,
            )
            await current.commit_partial()
            raise
        except asyncio.CancelledError:
            await current.commit_partial()
            raise
        await current.run_calls()
        usage, card = builder.usage(current.answer), turn.models.card(turn.choices.model)
        await turn.emit(UsageChanged(usage.input + usage.output, card.context, _cost(usage, card)))
        if not current.calls:
            return await _end(turn, current.answer)
    await turn.emit(
        Notice(
            f"The turn ended after {turn.settings.max_rounds} rounds (max_rounds); send another prompt to continue.",
            "warning",
        )
    )
    return "max_turn_requests"


class Round:
    """One round of the agent loop: a response and the results of its tool calls."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        used = [call.id for message in turn.messages for call in getattr(message, "calls", ())]
        kinds: dict[str, ToolKind] = {tool.name: tool.kind for tool in turn.toolbox.tools(turn.choices.mode)}
        self.answer = AnswerCollector(turn.emit, kinds, used)
        self.calls: list[Call] = []

    async def run_calls(self) -> None:
        """Run the response's tool calls; append response and results to the history.

        On cancellation, unfinished calls get failed results, and the response and all results are appended, too.
        """
        self.calls = [
            parse_call(call, self._turn, cut_off=self.answer.finish == "length") for call in self.answer.calls
        ]
        runner = ToolCallRunner(self._turn)
        try:
            await runner.run(self.calls)
        except asyncio.CancelledError:
            # Store the results before the events are sent, because sending may fail if the editor has disconnected.
            unsent_events = runner.cancel(self.calls)
            await self._commit(runner.results)
            for event in unsent_events:
                await self._turn.emit(event)
            raise
        await self._commit(runner.results)

    async def commit_partial(self) -> None:
        """Append the received text to the history, and tell the editor that calls failed.

        The message in the history contains no tool calls, because they may be incomplete.
        """
        message = self.answer.message(())
        if message is not None:
            await self._turn.commit(message)
        for call in self.answer.calls:
            if call.started:
                await self._turn.emit(CallChanged(call.id, "failed", output="The answer ended within this call."))

    async def _commit(self, results: dict[str, ToolResult]) -> None:
        message = self.answer.message(tuple(call.message for call in self.calls))
        if message is not None:
            ordered = [results[call.message.id] for call in self.calls]
            await self._turn.commit(message, *ordered)


async def _request_answer(turn: Turn, builder: RequestBuilder, current: Round, provider: Provider) -> None:
    """Request one model response and collect it in `current.answer`.

    If the request exceeds the model's context, first let the model summarize the conversation. After a temporary error
    before the response began, wait and retry.

    Raises:
        ProviderError: the endpoint failed and no retry helped, the response broke off, or the request is too long.
    """
    retries, waited_s, overflows, compacted = 0, 0.0, 0, False
    while True:
        request = builder.request(provider)
        # At most one compaction per response: a summary of the summary would not be shorter.
        if builder.overflows and not compacted:
            compacted = True
            if await compact(turn):
                continue
        builder.check()
        try:
            # `aclosing` closes the HTTP stream at once if the turn is canceled.
            async with aclosing(provider.stream(request)) as events:
                await current.answer.read(events)
            builder.calibrate(current.answer.usage)
            return
        except ProviderError as error:
            if current.answer.begun:
                raise  # no retry, because the user has already seen the beginning of this response
            if error.kind == "context_limit" and overflows < MAX_OVERFLOWS:
                overflows += 1
                # `learn` stores the context size that the error states, and the next request fits this size. If the
                # error states no size, the next request is shorter than this one.
                builder.learn(error)
                continue
            delay_s = _wait(error, retries)
            if delay_s is None or waited_s + delay_s > MAX_TOTAL_WAIT_S:
                raise
            retries, waited_s = retries + 1, waited_s + delay_s
            await turn.emit(Notice(f"{error.message}. Retrying in {delay_s:.0f} s.", "warning"))
            await asyncio.sleep(delay_s)


def _wait(error: ProviderError, retries: int) -> float | None:
    """Return the seconds to wait after `retries` retries, or None to retry no more."""
    if error.kind not in ("rate_limit", "unavailable", "interrupted"):
        return None
    # If the endpoint states no delay, make only few attempts, with growing pauses.
    if error.retry_after is None:
        return 2.0**retries if retries < MAX_BLIND_RETRIES else None
    return error.retry_after if error.retry_after <= MAX_WAIT_S and retries < MAX_RETRIES else None


async def _end(turn: Turn, answer: AnswerCollector) -> StopReason:
    if not answer.text.strip():
        reason = "the answer reached its token limit" if answer.finish == "length" else "the answer ended without text"
        await turn.emit(Notice(f"The model gave no answer: {reason}; send the prompt again.", "warning"))
    return _STOP.get(answer.finish or "stop", "end_turn")


def _cost(usage: Usage, card: ModelCard) -> float | None:
    """Return the cost of one response in US dollars, or None if a price is unknown."""
    if card.input_price is None or card.output_price is None:
        return None
    cached_price = card.input_price if card.cached_price is None else card.cached_price
    uncached = max(0, usage.input - usage.cached)
    return (uncached * card.input_price + usage.cached * cached_price + usage.output * card.output_price) / 1e6
