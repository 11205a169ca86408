"""Parses the tool calls of a response, and runs them if the user permits it."""

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from helexa.acp.agent.answer import CallText
from helexa.acp.agent.context_and_compaction import Turn
from helexa.acp.conversation_and_events import (
    CallChanged,
    CallStarted,
    Card,
    CardContent,
    PlanChanged,
    Text,
    ToolCall,
    ToolResult,
)
from helexa.acp.host import ToolError
from helexa.acp.providers.tool_call_repair import MalformedCall, repair
from helexa.acp.tools.excerpt import ends, title
from helexa.acp.tools.permission_rules import Allowed, AskUser, Denied, PermissionRequest, rule
from helexa.acp.tools.tool_and_effects import Reads, Tool, ToolOutcome

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 8
MAX_RESULT_BYTES = 100_000
CANCELLED = "ERROR: the user cancelled this call."

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed tool call, or the reason why the call cannot be run."""

    # The call as stored in the history. Its name and arguments are valid for any endpoint, even if the model's call was
    # malformed.
    message: ToolCall
    started: bool  # whether `CallStarted` was emitted
    tool: Tool | None = None  # the called tool, or None if the call is malformed or names an unknown tool
    # the parsed arguments, or None if they are malformed or do not match the tool's schema
    arguments: dict[str, Any] | None = None
    failure: str | None = None  # error message for the model if the call cannot be run, else None


def parse_call(text: CallText, turn: Turn, *, cut_off: bool) -> Call:
    """Return the parsed tool call, with checked arguments or with a `failure` message.

    Args:
        text: the tool call as the model wrote it.
        turn: provides the tools that the model may call.
        cut_off: whether the model's response ended at its token limit. If True, the error message of a malformed call
            names the token limit as the cause.
    """
    tools = {tool.name: tool for tool in turn.toolbox.tools(turn.choices.mode)}
    parsed = repair(text.name, text.arguments, {name: tool.schema for name, tool in tools.items()})
    name = text.name if _NAME.fullmatch(text.name) else "malformed_call"
    if isinstance(parsed, MalformedCall):
        reason = "the answer was cut off at its token limit; write less in one call" if cut_off else parsed.reason
        known = tools.get(text.name)
        hint = f" Its arguments are: {json.dumps(known.schema)}" if known else f" Your tools are: {', '.join(tools)}."
        # Endpoints reject a history whose calls are not valid JSON.
        message = ToolCall(text.id, name, json.dumps({"malformed": text.arguments}, ensure_ascii=False))
        return Call(message, text.started, failure=f"ERROR: this call could not be read: {reason}.{hint}")
    name = parsed.name if _NAME.fullmatch(parsed.name) else name
    message = ToolCall(text.id, name, json.dumps(parsed.arguments, ensure_ascii=False))
    tool = turn.toolbox.find(parsed.name)
    if tool is None:
        known = ", ".join(tools)
        return Call(
            message,
            text.started,
            arguments=parsed.arguments,
            failure=f"ERROR: there is no tool {name!r}; your tools are: {known}.",
        )
    try:
        return Call(message, text.started, tool, tool.check(parsed.arguments))
    except ToolError as error:
        return Call(message, text.started, tool, failure=f"ERROR: {error}")


class ToolCallRunner:
    """Runs the tool calls of one model response."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._cards: dict[str, Card] = {}
        self.results: dict[str, ToolResult] = {}  # results of finished calls by call id

    async def run(self, calls: Sequence[Call]) -> None:
        """Run all calls and store their results in `results`.

        A call that raises an error gets a failed result. The method raises only CancelledError.
        """
        remaining = list(calls)
        while remaining:
            reading = next(
                (index for index, call in enumerate(remaining) if not self._reads_only(call)), len(remaining)
            )
            # Calls that only read run concurrently. Any other call runs alone and in order, because it may depend on
            # the calls before.
            size = min(max(reading, 1), MAX_CONCURRENT_CALLS)
            batch, remaining = remaining[:size], remaining[size:]
            async with asyncio.TaskGroup() as tasks:
                for call in batch:
                    tasks.create_task(self._run(call))

    def cancel(self, calls: Sequence[Call]) -> list[CallChanged]:
        """Store a failed result for each unfinished call.

        Return the events that report these failures, only for calls that the editor already shows. The caller must emit
        the events.
        """
        unsent_events: list[CallChanged] = []
        for call in calls:
            id, card = call.message.id, self._card(call)
            if id not in self.results:
                card = msgspec.structs.replace(card, content=(*card.content, Text(CANCELLED)))
                self.results[id] = ToolResult(id, CANCELLED, failed=True, card=card)
                if call.started or id in self._cards:
                    unsent_events.append(CallChanged(id, "failed", card, output=CANCELLED))
        return unsent_events

    def _reads_only(self, call: Call) -> bool:
        # An invalid call runs no tool. It only reports its error.
        if call.tool is None or call.arguments is None:
            return True
        try:
            # A read of a secret file is not equal to `Reads()`. It must run alone, because it asks the user for
            # permission, and the agent asks only one question at a time.
            return call.tool.act(call.arguments, self._turn.context) == Reads()
        except ToolError:
            return True

    async def _run(self, call: Call) -> None:
        try:
            outcome = await self._outcome(call)
        except ToolError as error:
            outcome = ToolOutcome(f"ERROR: {error}", failed=True)
        except Exception as error:
            logger.exception(
                "tool failed with an internal error tool=%s call=%s; the model gets this error",
                call.message.name,
                call.message.id,
            )
            outcome = ToolOutcome(f"ERROR: the tool itself failed: {type(error).__name__}: {error}", failed=True)
        await self._end(call, outcome)

    async def _outcome(self, call: Call) -> ToolOutcome:
        tool, arguments, turn = call.tool, call.arguments, self._turn
        if tool is None or arguments is None:
            return ToolOutcome(call.failure or "", failed=True)
        id = call.message.id
        ruling = rule(tool, arguments, turn.choices.mode, turn.context, turn.ruling)
        if isinstance(ruling, Denied):
            raise ToolError(ruling.reason)
        card = Card(tool.title(arguments, turn.context), tool.kind, tool.locations(arguments, turn.context))
        if isinstance(ruling, AskUser):
            card = msgspec.structs.replace(card, content=await tool.preview(arguments, turn.context))
        await self._show(call, card)
        if isinstance(ruling, AskUser):
            verdict = await turn.request_permission(PermissionRequest(id, tool.name, card, arguments, ruling.offers))
            if verdict not in ("allow_once", "allow_always"):
                raise ToolError(
                    "The user did not allow this call. Do not repeat the call; ask the user what to do instead."
                )
        elif not isinstance(ruling, Allowed):
            raise ToolError(f"this call of {tool.name} is not allowed; use another tool or ask the user")

        async def progress(content: tuple[CardContent, ...]) -> None:
            self._cards[id] = msgspec.structs.replace(self._cards[id], content=content)
            await turn.emit(CallChanged(id, card=self._cards[id]))

        await turn.emit(CallChanged(id, status="in_progress"))
        return await tool.run(arguments, turn.context, progress)

    def _card(self, call: Call) -> Card:
        if call.message.id in self._cards:
            return self._cards[call.message.id]
        if call.tool is None and call.arguments is None:
            return Card("Malformed tool call")
        return Card(title(call.message.name), call.tool.kind if call.tool else "other")

    async def _show(self, call: Call, card: Card) -> None:
        """Emit an event that makes the editor show `card`, the display of the tool call."""
        self._cards[call.message.id] = card
        if call.started:
            await self._turn.emit(CallChanged(call.message.id, card=card, arguments=call.arguments))
        else:
            await self._turn.emit(CallStarted(call.message.id, call.message.name, card, call.arguments))

    async def _end(self, call: Call, outcome: ToolOutcome) -> None:
        id = call.message.id
        content = ends(outcome.content, MAX_RESULT_BYTES)
        card = self._card(call)
        if id not in self._cards:
            await self._show(call, card)
        card = msgspec.structs.replace(
            card, content=outcome.shown or (Text(content),), locations=outcome.locations or card.locations
        )
        self.results[id] = ToolResult(id, content, outcome.failed, outcome.images, card, outcome.plan)
        status = "failed" if outcome.failed else "completed"
        await self._turn.emit(CallChanged(id, status, card, output=content))
        if outcome.plan is not None:
            await self._turn.emit(PlanChanged(outcome.plan))
