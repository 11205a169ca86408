"""Collect the results of a parser as output events."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from helexa.neuron.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart, WasReasoning
from helexa.neuron.parsers.code_blocks import CodeBlocks
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.source import MAX_NAME, NotACall
from helexa.neuron.parsers.value_schema import child_schema

Tools = Mapping[str, Mapping[str, Any]]
"""The tools of a request: tool name -> JSON Schema of the tool's arguments."""


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
        named: whether the current block contains the name of a tool call.
        repairs: names of the mistakes in tool calls that were repaired.
        structured: whether a grammar decides the text, so that markers in the text are text.
        known_only: whether only the names of tools in the request are accepted.
        code: code blocks of the text.
    """

    def __init__(self, tools: Tools | None, new_id: Callable[[], str], *, structured: bool = False) -> None:
        self.reasoning = False
        self.begun = False
        self.open_call = False
        self.broken = False
        self.named = False
        self.repairs: set[str] = set()
        self.structured = structured
        self.known_only = False
        self.code = CodeBlocks()
        self._tools = tools
        self._new_id = new_id
        self.calls = 0
        self._events: list[OutputEvent] = []
        self._trial: tuple[int, bool, bool] | None = None
        self._withheld: list[OutputEvent] = []

    def begin_trial(self) -> None:
        """Withhold the following events until `end_trial` is called."""
        self._trial = self.calls, self.broken, self.begun
        self._events, self._withheld = [], self._events

    def end_trial(self, *, accepted: bool) -> list[OutputEvent]:
        """End a trial. Add its events if they are `accepted`, and otherwise return these events."""
        assert self._trial is not None
        events, self._events, self._withheld = self._events, self._withheld, []
        if accepted:
            self._events += events
        else:
            self.calls, self.broken, self.begun = self._trial
            self.open_call = False
        self._trial = None
        return [] if accepted else events

    def add_calls(self, events: Sequence[OutputEvent]) -> None:
        """Add the events of complete tool calls, which `end_trial` has returned."""
        self._events += events
        self.calls += sum(isinstance(event, ToolCallStart) for event in events)

    def drain(self) -> list[OutputEvent]:
        """Return the events that were added since the last call of `drain`, except for those of an open trial."""
        if self._trial is not None:
            events, self._withheld = self._withheld, []
        else:
            events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Add `text`, which is neither reasoning nor a tool call."""
        if text:
            self.begun = True
            self.code.feed(text)
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
        if (known or self.known_only) and self._tools is not None and name not in self._tools:
            raise NotACall
        self.named = True

    def schema(self, tool: str) -> Mapping[str, Any]:
        """Return the JSON Schema of the arguments of the tool `tool`, or an empty schema if the tool is unknown."""
        schema = (self._tools or {}).get(tool, {})
        return schema if isinstance(schema, Mapping) else {}

    def offers(self, tool: str) -> bool:
        """Return whether the request has the tool `tool`, or the tools are unknown."""
        return self._tools is None or tool in self._tools

    def parameter(self, tool: str, name: str) -> Mapping[str, Any]:
        """Return the JSON Schema of the parameter `name` of the tool `tool`, or an empty schema if it is unknown.

        The result includes the definitions (`$defs`) of the tool's schema.
        """
        schema = self.schema(tool)
        return child_schema(schema, name, schema)

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
