"""Build the output items of a Responses API response from a run's events."""

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
    """Builds output items one after the other. Each item is complete before the next item begins.

    Args:
        stem: string that all item ids of the response have in common.
        namespaces: namespace of each function that has one, by function name.

    Attributes:
        items: the complete items.
    """

    def __init__(self, stem: str, namespaces: Mapping[str, str]) -> None:
        self.items: list[dict[str, Any]] = []
        self._stem = stem
        self._namespaces = namespaces
        self._item: ResponseItem | None = None
        self._answered = False  # there is a message or a call

    def take(self, event: OutputEvent) -> list[Event]:
        """Add an event of the run to the items. Return the resulting stream events."""
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
        """Turn the last message into reasoning. Called only for responses that are not streamed."""
        if isinstance(self._item, MessageItem):
            reasoning = ReasoningItem(self._stem, self._item.index)
            reasoning.add(ReasoningDelta(self._item.text))
            self._item = reasoning
            self._answered = any(item["type"] != "reasoning" for item in self.items)

    def end(self, status: ItemStatus) -> list[Event]:
        """End the output and return the resulting stream events. The last item gets the status `status`.

        If the output has neither text nor calls, an empty message is added, because some clients expect a message.
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
