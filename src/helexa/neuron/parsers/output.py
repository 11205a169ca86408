"""What was read of a model's text, on its way out as events."""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from helexa.neuron.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from helexa.neuron.parsers.source import NotACall

Tools = Mapping[str, Mapping[str, Any]]
"""The tools on offer: the JSON Schema of each one's arguments, by name."""


def random_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


class Output:
    """Collects events between two pushes.

    Args:
        tools: the tools that may be called; None where any name counts.
        new_id: makes the id of a call.

    Attributes:
        reasoning: what is read is the model's reasoning.
        calls: how many calls have begun.
        open_call: the arguments of the last call are not complete.
    """

    def __init__(self, tools: Tools | None, new_id: Callable[[], str]) -> None:
        self.reasoning = False
        self.open_call = False
        self._tools = tools
        self._new_id = new_id
        self.calls = 0
        self._events: list[OutputEvent] = []

    def drain(self) -> list[OutputEvent]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """The answer goes on."""
        if text:
            self._events.append(TextDelta(text))

    def thought(self, text: str) -> None:
        """The reasoning goes on."""
        if text:
            self._events.append(ReasoningDelta(text))

    def knows(self, name: str) -> bool:
        """Whether there is such a tool, as far as that is known."""
        return name != "" and name.isprintable() and (self._tools is None or name in self._tools)

    def check(self, name: str) -> None:
        """Refuse a name of no tool.

        Raises:
            NotACall: there is no such tool.
        """
        if not self.knows(name):
            raise NotACall

    def parameter(self, tool: str, name: str) -> Mapping[str, Any]:
        """The JSON Schema of a tool's parameter; empty where it has none."""
        properties = (self._tools or {}).get(tool, {}).get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}

    def start(self, name: str) -> None:
        """A call begins."""
        self._events.append(ToolCallStart(self.calls, self._new_id(), name))
        self.calls += 1
        self.open_call = True

    def arguments(self, fragment: str) -> None:
        """The call that was started last has further arguments."""
        if fragment:
            self._events.append(ToolCallDelta(self.calls - 1, fragment))

    def end(self) -> None:
        """The arguments of the call that was started last are complete."""
        self.open_call = False
