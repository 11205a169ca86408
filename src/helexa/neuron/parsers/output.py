"""What was read of a model's text, on its way out as events."""

import json
import secrets
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from helexa.neuron.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart, WasReasoning
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.schema_types import with_definitions
from helexa.neuron.parsers.source import MAX_NAME, NotACall

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
        begun: there is text, or a call.
        calls: how many calls have begun.
        open_call: the arguments of the last call are not complete.
        broken: those of an earlier one are not, and stay so.
    """

    def __init__(self, tools: Tools | None, new_id: Callable[[], str]) -> None:
        self.reasoning = False
        self.begun = False
        self.open_call = False
        self.broken = False
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
            self.begun = True
            self._events.append(TextDelta(text))

    def thought(self, text: str) -> None:
        """The reasoning goes on."""
        if text:
            self._events.append(ReasoningDelta(text))

    def was_reasoning(self) -> None:
        """What the answer said so far was none of it."""
        if self.begun:
            self._events.append(WasReasoning())

    @property
    def calls_count(self) -> bool:
        """Whether there are tools to call, as far as that is known."""
        return self._tools is None or bool(self._tools)

    @cached_property
    def quoted_names(self) -> Markers:
        """The names of the offered tools as JSON strings; none where the tools are not known."""
        return Markers(json.dumps(name, ensure_ascii=False) for name in self._tools or ())

    def check(self, name: str, *, known: bool = False) -> None:
        """Refuse what is no name.

        Args:
            known: it must be the name of a tool, because nothing else shows that this is a call.

        Raises:
            NotACall: it is none.
        """
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise NotACall
        if known and self._tools is not None and name not in self._tools:
            raise NotACall

    def parameter(self, tool: str, name: str) -> Mapping[str, Any]:
        """The JSON Schema of a tool's parameter, with what it refers to; empty where it has none."""
        whole = (self._tools or {}).get(tool, {})
        properties = whole.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        return with_definitions(schema, whole) if isinstance(schema, Mapping) else {}

    def start(self, name: str) -> None:
        """A call begins."""
        self._events.append(ToolCallStart(self.calls, self._new_id(), name))
        self.calls += 1
        self.begun = True
        self.broken |= self.open_call
        self.open_call = True

    def arguments(self, fragment: str) -> None:
        """The call that was started last has further arguments."""
        if fragment:
            self._events.append(ToolCallDelta(self.calls - 1, fragment))

    def end(self) -> None:
        """The arguments of the call that was started last are complete."""
        self.open_call = False
