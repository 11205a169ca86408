"""Collects one streamed response of the model."""

import re
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from helexa.acp.conversation_and_events import (
    AssistantMessage,
    CallStarted,
    Card,
    Emit,
    TextDelta,
    ThoughtDelta,
    ToolCall,
    ToolKind,
)
from helexa.acp.providers.requests_and_events import (
    AnswerDelta,
    CallDelta,
    End,
    FinishReason,
    ModelEvent,
    ProviderError,
    ReasoningDelta,
    Usage,
)
from helexa.acp.tools.excerpt import title

# A model can repeat itself forever. These limits end the answer before it fills the memory of the agent.
MAX_CHARACTERS = 16 << 20
MAX_CALLS = 128

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


@dataclass(slots=True)
class CallText:
    """A tool call of a response, as unparsed text that arrives in chunks."""

    id: str  # call id, unique in the session
    name: str  # tool name, or empty if `text` contains the whole call including the tool's name
    text: list[str] = field(default_factory=list)  # chunks of the arguments
    started: bool = False  # whether `CallStarted` was emitted

    @property
    def arguments(self) -> str:
        """The argument text received so far, as one string."""
        return "".join(self.text)


class AnswerCollector:
    """Collects the streamed events of one model response."""

    def __init__(self, emit: Emit, kinds: Mapping[str, ToolKind], used_ids: Iterable[str]) -> None:
        """Prepare for a response that has not begun.

        Args:
            emit: callback that receives the agent's events, for example text deltas for the editor.
            kinds: kind of each tool (read, edit, execute, ...) by tool name.
            used_ids: call ids of earlier responses. A call that repeats one of these ids gets a new id.
        """
        self.id = str(uuid.uuid4())  # id of the response's message in the conversation history
        self.calls: list[CallText] = []  # tool calls in the order of their first delta
        self.usage: Usage | None = None  # token counts, or None if the endpoint reported none
        self.finish: FinishReason | None = None  # finish reason, or None before the end of the response
        self.begun = False  # whether any event of the response has arrived
        self._emit = emit
        self._kinds = kinds
        self._used = set(used_ids)
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._extras: dict[str, Any] = {}
        self._by_index: dict[int, CallText] = {}
        self._size = 0

    @property
    def text(self) -> str:
        """The text of the response received so far, without reasoning and tool calls."""
        return "".join(self._text)

    async def read(self, events: AsyncIterator[ModelEvent]) -> None:
        """Collect the response's events; pass text, reasoning and new calls to `emit`.

        Raises:
            ProviderError: the endpoint failed, or the response exceeds a size limit.
        """
        async for event in events:
            self.begun = True
            match event:
                case AnswerDelta(text):
                    self._grow(text)
                    self._text.append(text)
                    await self._emit(TextDelta(self.id, text))
                case ReasoningDelta(text):
                    self._grow(text)
                    self._reasoning.append(text)
                    await self._emit(ThoughtDelta(self.id, text))
                case CallDelta():
                    await self._call(event)
                case Usage():
                    self.usage = event
                case End(reason, extras):
                    self.finish, self._extras = reason, extras

    def message(self, calls: tuple[ToolCall, ...]) -> AssistantMessage | None:
        """Return the response and its parsed `calls` as a message for the history.

        Return None if the response has no text, no reasoning and no calls.
        """
        text, reasoning = self.text, "".join(self._reasoning)
        if not text and not reasoning and not calls:
            return None
        return AssistantMessage(self.id, text, reasoning, calls, self._extras, partial=self.finish is None)

    async def _call(self, delta: CallDelta) -> None:
        call = self._by_index.get(delta.index)
        if call is None:
            if len(self.calls) == MAX_CALLS:
                raise ProviderError(
                    "invalid", f"the model's answer has more than {MAX_CALLS} tool calls; send the prompt again"
                )
            call = self._by_index[delta.index] = CallText(self._free_id(delta.id), delta.name or "")
            self.calls.append(call)
        self._grow(delta.arguments)
        call.text.append(delta.arguments)
        call.name = call.name or delta.name or ""
        # Emit the event at the first chunk that names the tool, so that the editor shows the call while its arguments
        # still arrive.
        if call.name and not call.started:
            call.started = True
            card = Card(title(call.name), self._kinds.get(call.name, "other"))
            await self._emit(CallStarted(call.id, call.name, card))

    def _free_id(self, endpoint_id: str | None) -> str:
        """Return `endpoint_id` if it is a valid and unused call id, else a new id."""
        id = (
            endpoint_id
            # Some endpoints send no call ids, or repeat the same ids in each response.
            if endpoint_id and _ID.fullmatch(endpoint_id) and endpoint_id not in self._used
            else f"call_{uuid.uuid4().hex}"
        )
        self._used.add(id)
        return id

    def _grow(self, text: str) -> None:
        self._size += len(text)
        if self._size > MAX_CHARACTERS:
            raise ProviderError(
                "invalid", f"the model's answer has more than {MAX_CHARACTERS} characters; send the prompt again"
            )
