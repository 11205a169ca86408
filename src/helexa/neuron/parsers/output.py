"""Collect the results of a parser as output events."""

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
"""The tools of a request: tool name -> JSON Schema of the tool's arguments."""


def random_call_id() -> str:
    """Return a new random id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


class Output:
    """Collects the output events of one response. The parsers add text, reasoning and tool calls.

    Args:
        tools: the tools of the request. None if the tools are unknown. In this case, calls of any tool name are
            accepted.
        new_id: function that returns the id for a new tool call.

    Attributes:
        reasoning: whether the parser is inside reasoning.
        begun: whether text or a tool call was added.
        calls: number of tool calls that have begun.
        open_call: whether the arguments of the last tool call are incomplete.
        broken: whether a tool call before the last one has incomplete arguments.
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
        """Return the events that were added since the last call of `drain`."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Add `text`, which is neither reasoning nor a tool call."""
        if text:
            self.begun = True
            self._events.append(TextDelta(text))

    def thought(self, text: str) -> None:
        """Add text of the model's reasoning."""
        if text:
            self._events.append(ReasoningDelta(text))

    def was_reasoning(self) -> None:
        """Mark all text that was added so far as reasoning, because a closing reasoning marker follows it."""
        if self.begun:
            self._events.append(WasReasoning())

    @property
    def may_call(self) -> bool:
        """Whether the parser may accept tool calls, because the request has tools or the tools are unknown."""
        return self._tools is None or bool(self._tools)

    @cached_property
    def quoted_names(self) -> Markers:
        """The names of the request's tools as JSON strings with quotation marks. Empty if the tools are unknown."""
        return Markers(json.dumps(name, ensure_ascii=False) for name in self._tools or ())

    def check(self, name: str, *, known: bool = False) -> None:
        """Raise `NotACall` if `name` cannot be the tool name of a call.

        Args:
            name: name of the tool.
            known: whether only the names of tools in the request are accepted. A caller sets `known` if the name is the
                only sign that a text is a tool call.

        Raises:
            NotACall: the name is invalid, or `known` is true and the request has no tool with this name.
        """
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise NotACall
        if known and self._tools is not None and name not in self._tools:
            raise NotACall

    def parameter(self, tool: str, name: str) -> Mapping[str, Any]:
        """Return the JSON Schema of the parameter `name` of the tool `tool`, or an empty schema if it is unknown.

        The result includes the definitions (`$defs`) of the tool's schema.
        """
        tool_schema = (self._tools or {}).get(tool, {})
        properties = tool_schema.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        return with_definitions(schema, tool_schema) if isinstance(schema, Mapping) else {}

    def start(self, name: str) -> None:
        """Add the beginning of a tool call, with the name of the tool and a new id."""
        self._events.append(ToolCallStart(self.calls, self._new_id(), name))
        self.calls += 1
        self.begun = True
        self.broken |= self.open_call
        self.open_call = True

    def arguments(self, fragment: str) -> None:
        """Add a fragment of the arguments of the last tool call. The fragments together are JSON text."""
        if fragment:
            self._events.append(ToolCallDelta(self.calls - 1, fragment))

    def end(self) -> None:
        """Mark the arguments of the last tool call as complete."""
        self.open_call = False
