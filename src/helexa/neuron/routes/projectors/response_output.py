"""Build the output items of a response in OpenAI's Responses API from the output events of a run."""

from collections.abc import Mapping
from typing import Any

from helexa.core.wire.responses.output import Event, ItemStatus
from helexa.neuron.events import (
    OutputEvent,
    PromptScores,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    WasReasoning,
)
from helexa.neuron.routes.projectors.response_items import CallItem, MessageItem, ReasoningItem, ResponseItem


class ResponseOutput:
    """Builds the output items of a response one after the other. An item is completed before the next one begins.

    Args:
        stem: random string that the ids of the response and of all its items contain.
        namespaces: namespaces of the functions that have one, by function name.

    Attributes:
        items: the completed items, as JSON objects.
    """

    def __init__(self, stem: str, namespaces: Mapping[str, str]) -> None:
        self.items: list[dict[str, Any]] = []
        self._stem = stem
        self._namespaces = namespaces
        self._item: ResponseItem | None = None
        self._answered = False  # there is a message or a call

    def take(self, event: OutputEvent) -> list[Event]:
        """Add the content of an output event to the current item or a new item, and return the stream events for it."""
        item = self._item
        match event:
            case TextDelta():
                if isinstance(item, MessageItem):
                    return [item.add(event)]
                message = MessageItem(self._stem, self._next)
                return [*self._open(message), message.add(event)]
            case ReasoningDelta():
                if isinstance(item, ReasoningItem):
                    return [item.add(event)]
                reasoning = ReasoningItem(self._stem, self._next)
                return [*self._open(reasoning), reasoning.add(event)]
            case ToolCallStart():
                return self._open(CallItem(self._stem, self._next, event, self._namespaces.get(event.name)))
            case ToolCallDelta():
                assert isinstance(item, CallItem)
                return [item.add(event)]
            case WasReasoning() | PromptScores():
                return []

    def was_reasoning(self) -> None:
        """Replace the current message by a reasoning item with the same text. Not permitted in a stream."""
        if isinstance(self._item, MessageItem):
            reasoning = ReasoningItem(self._stem, self._item.index)
            reasoning.add(ReasoningDelta(self._item.text))
            self._item = reasoning
            self._answered = any(item["type"] != "reasoning" for item in self.items)

    def end(self, status: ItemStatus) -> list[Event]:
        """Complete the last item with the status `status`, and return the remaining stream events of the items.

        If there is neither a message nor a tool call, an empty message is added, because some clients expect one.
        """
        closed = self._close(status)
        if self._answered:
            return closed
        return [*closed, *self._open(MessageItem(self._stem, self._next)), *self._close(status)]

    @property
    def _next(self) -> int:
        return len(self.items) + (self._item is not None)

    def _open(self, item: ResponseItem) -> list[Event]:
        closed = self._close("completed")
        self._item = item
        self._answered = self._answered or not isinstance(item, ReasoningItem)
        return [*closed, *item.opening()]

    def _close(self, status: ItemStatus) -> list[Event]:
        if self._item is None:
            return []
        events, value = self._item.closing(status)
        self.items.append(value)
        self._item = None
        return events
