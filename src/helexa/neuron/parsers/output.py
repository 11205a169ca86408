"""Convert the parsed text of a model to output events."""

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
"""The offered tools: tool name -> JSON Schema of the tool's arguments."""


def random_call_id() -> str:
    """Return a new random id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


class Output:
    """Collects the output events of one answer until `drain` returns them.

    Args:
        tools: the tools that the request offers; None if the tools are unknown, so that calls of any name are accepted.
        new_id: function that returns an id for a new call.

    Attributes:
        reasoning: the last text that was added is reasoning.
        begun: the output has answer text or a call.
        calls: number of calls that have begun.
        open_call: True while the arguments of the last call are incomplete.
        broken: True if a call other than the last call ended with incomplete arguments.
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
        """Return the events that were collected since the last call of `drain`."""
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Add answer text."""
        if text:
            self.begun = True
            self._events.append(TextDelta(text))

    def thought(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self._events.append(ReasoningDelta(text))

    def was_reasoning(self) -> None:
        """Mark all answer text so far as reasoning."""
        if self.begun:
            self._events.append(WasReasoning())

    @property
    def may_call(self) -> bool:
        """Whether the parser may accept tool calls: the request offers tools, or the tools are unknown."""
        return self._tools is None or bool(self._tools)

    @cached_property
    def quoted_names(self) -> Markers:
        """The names of the offered tools as markers, each written as a JSON string; none if the tools are unknown."""
        return Markers(json.dumps(name, ensure_ascii=False) for name in self._tools or ())

    def check(self, name: str, *, known: bool = False) -> None:
        """Raise an error if a call may not have this tool name.

        Args:
            name: name of the tool.
            known: accept only names of offered tools, because nothing but the name marks the text as a call.

        Raises:
            NotACall: the name is invalid, or `known` is set and no offered tool has this name.
        """
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise NotACall
        if known and self._tools is not None and name not in self._tools:
            raise NotACall

    def parameter(self, tool: str, name: str) -> Mapping[str, Any]:
        """Return the JSON Schema of the parameter `name` of `tool`, with its definitions; empty if it has no schema."""
        tool_schema = (self._tools or {}).get(tool, {})
        properties = tool_schema.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        return with_definitions(schema, tool_schema) if isinstance(schema, Mapping) else {}

    def start(self, name: str) -> None:
        """Add the beginning of a call of the tool `name`."""
        self._events.append(ToolCallStart(self.calls, self._new_id(), name))
        self.calls += 1
        self.begun = True
        self.broken |= self.open_call
        self.open_call = True

    def arguments(self, fragment: str) -> None:
        """Add a fragment of the JSON text of the current call's arguments."""
        if fragment:
            self._events.append(ToolCallDelta(self.calls - 1, fragment))

    def end(self) -> None:
        """Mark the arguments of the current call as complete."""
        self.open_call = False
