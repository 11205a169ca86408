"""One answer of a model as it arrives: told to the user at once, kept for the history."""

import re
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from helexa.acp.events import CallStarted, Emit, TextDelta, ThoughtDelta
from helexa.acp.history import AssistantMessage, Card, ToolCall, ToolKind
from helexa.acp.providers.provider import (
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

MOST_CHARACTERS = 16 << 20
MOST_CALLS = 128

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


@dataclass(slots=True)
class CallText:
    """A call as the model writes it: the name is empty where the text has to tell."""

    id: str
    name: str
    text: list[str] = field(default_factory=list)
    started: bool = False  # whether the user has been told

    @property
    def arguments(self) -> str:
        """All of the text so far."""
        return "".join(self.text)


class Answer:
    """Collects one answer.

    Attributes:
        id: of the message.
        calls: in the order in which they began.
        finish: why it ended; None while it has not.
        begun: whether anything of it has arrived.
    """

    def __init__(self, emit: Emit, kinds: Mapping[str, ToolKind], used_ids: Iterable[str]) -> None:
        """`kinds` are those of the tools, by name; no call gets one of `used_ids`."""
        self.id = str(uuid.uuid4())
        self.calls: list[CallText] = []
        self.usage: Usage | None = None
        self.finish: FinishReason | None = None
        self.begun = False
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
        """What it says."""
        return "".join(self._text)

    async def read(self, events: AsyncIterator[ModelEvent]) -> None:
        """Take the answer in until it ends.

        Raises:
            ProviderError: the endpoint fails, or never stops.
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
        """The answer for the history, with the calls as they were understood; None where nothing has arrived."""
        text, reasoning = self.text, "".join(self._reasoning)
        if not text and not reasoning and not calls:
            return None
        return AssistantMessage(self.id, text, reasoning, calls, self._extras, partial=self.finish is None)

    async def _call(self, delta: CallDelta) -> None:
        call = self._by_index.get(delta.index)
        if call is None:
            if len(self.calls) == MOST_CALLS:
                raise ProviderError("invalid", f"the model wants more than {MOST_CALLS} calls at once")
            call = self._by_index[delta.index] = CallText(self._free_id(delta.id), delta.name or "")
            self.calls.append(call)
        self._grow(delta.arguments)
        call.text.append(delta.arguments)
        call.name = call.name or delta.name or ""
        if call.name and not call.started:
            call.started = True
            card = Card(title(call.name), self._kinds.get(call.name, "other"))
            await self._emit(CallStarted(call.id, call.name, card))

    def _free_id(self, wanted: str | None) -> str:
        """An id that no other call of the session has; some endpoints count anew in each answer, or give none."""
        id = wanted if wanted and _ID.fullmatch(wanted) and wanted not in self._used else f"call_{uuid.uuid4().hex}"
        self._used.add(id)
        return id

    def _grow(self, text: str) -> None:
        self._size += len(text)
        if self._size > MOST_CHARACTERS:
            raise ProviderError("invalid", f"the answer is longer than {MOST_CHARACTERS} characters")
