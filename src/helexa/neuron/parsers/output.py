"""Collect the events of a model's output, and track code blocks in its text."""

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

from helexa.neuron.output_events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    WasReasoning,
)
from helexa.neuron.parsers.json_schema import child_schema
from helexa.neuron.parsers.source import MAX_NAME, Markers, NotACall

_FENCE = re.compile(r"[ \t>]*(`{3,})([^`\n]*)\Z")
_NAMESPACE = re.compile(r".*[.:/]")
_MAX_LINE = 200  # characters of a line that are kept; the beginning of a fence is at the beginning of a line

Tools = Mapping[str, Mapping[str, Any]]  # The tools of a request: tool name -> JSON Schema of the tool's arguments


class CodeBlocks:
    """Tracks Markdown code blocks and code spans in the output of a model."""

    def __init__(self) -> None:
        self.fence = ""  # the backticks that began the current code block; "" outside of code blocks
        self.has_content = False  # whether the current code block contains text after its first line
        self._line = ""  # the beginning of the current line
        self._backticks = 0  # number of runs of backticks in the current line
        self._in_run = False

    @property
    def in_span(self) -> bool:
        """Whether the text so far ends inside a code span of its last line."""
        return not self.fence and self._backticks % 2 == 1

    @property
    def in_block(self) -> bool:
        """Whether the text so far ends inside a code block."""
        return bool(self.fence)

    @property
    def begins_block(self) -> bool:
        """Whether the text so far ends at the beginning of a code block's content."""
        return self.in_block and not self.has_content and not self._line.strip()

    def feed(self, text: str) -> None:
        """Append the next piece of text, and update the state of the code block."""
        if "\n" not in text and "`" not in text:  # most tokens
            if text:
                self._in_run = False
                if len(self._line) < _MAX_LINE:
                    self._line += text[:_MAX_LINE]
            return
        *lines, last = text.split("\n")
        for line in lines:
            self._add(line)
            self._end_line()
        self._add(last)

    def _add(self, text: str) -> None:
        if len(self._line) < _MAX_LINE:
            self._line += text[: _MAX_LINE - len(self._line)]
        if "`" in text:
            # A run of several backticks begins or ends one code span.
            for char in text:
                self._backticks += char == "`" and not self._in_run
                self._in_run = char == "`"
        elif text:
            self._in_run = False

    def _end_line(self) -> None:
        fence = _FENCE.match(self._line)
        if fence and not self.fence:
            self.fence, self.has_content = fence[1], False
        # Only a fence with at least as many backticks and no text after it ends the block (CommonMark).
        elif fence and len(fence[1]) >= len(self.fence) and not fence[2].strip():
            self.fence = ""
        elif self.fence:
            self.has_content |= bool(self._line.strip())
        self._line = ""
        self._backticks, self._in_run = 0, False


class Output:
    """Collects the events of one response, which the parsers add."""

    def __init__(self, tools: Tools | None, new_id: Callable[[], str], *, structured: bool = False) -> None:
        self.reasoning = False  # whether the parser is inside reasoning
        self.begun = False  # whether text or a tool call was added
        self.open_call = False  # whether the arguments of the last tool call are incomplete
        self.broken = False  # whether a tool call before the last one has incomplete arguments
        self.named = False  # whether the current block contains the name of a tool call
        self.repairs: set[str] = set()  # names of the mistakes in tool calls that were repaired
        self.structured = structured  # whether a grammar decides the text, so that markers in the text are text
        self.known_only = False  # whether only the names of tools in the request are accepted
        self.code = CodeBlocks()  # code blocks of the text
        self._tools = tools  # the tools of the request. None if they are unknown: calls of any tool are accepted.
        self._new_id = new_id  # returns the id for a new tool call
        self.calls = 0  # number of tool calls that have begun
        self._events: list[OutputEvent] = []
        self._trial: tuple[int, bool, bool] | None = None
        self._withheld: list[OutputEvent] = []

    @property
    def on_trial(self) -> bool:
        """Whether events are withheld until `end_trial` is called."""
        return self._trial is not None

    def begin_trial(self) -> None:
        """Withhold the following events until `end_trial`; trials cannot be nested."""
        self._trial = self.calls, self.broken, self.begun
        self._events, self._withheld = [], self._events

    def end_trial(self, *, accepted: bool) -> list[OutputEvent]:
        """End a trial. If `accepted`, add its events and return []; else return them."""
        assert self._trial is not None
        events, self._events, self._withheld = self._events, self._withheld, []
        if accepted:
            self._events += events
        else:
            # The events do not count, so restore the numbers and flags from before the trial.
            self.calls, self.broken, self.begun = self._trial
            self.open_call = False
        self._trial = None
        return [] if accepted else events

    def add_calls(self, events: Sequence[OutputEvent]) -> None:
        """Add the events of calls from `end_trial`; no call may have begun since."""
        self._events += events
        self.calls += sum(isinstance(event, ToolCallStart) for event in events)

    def drain(self) -> list[OutputEvent]:
        """Return the events since the previous `drain`, without those of an open trial."""
        if self._trial is not None:
            events, self._withheld = self._withheld, []
        else:
            events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Add text that is neither reasoning nor a tool call."""
        if text:
            self.begun = True
            self.code.feed(text)
            self._events.append(TextDelta(text))

    def thought(self, text: str) -> None:
        """Add text of the model's reasoning."""
        if text:
            self._events.append(ReasoningDelta(text))

    def was_reasoning(self) -> None:
        """Mark all text so far as reasoning, because a closing marker follows it."""
        if self.begun:
            self._events.append(WasReasoning())

    @property
    def may_call(self) -> bool:
        """Whether the request has tools, or the tools are unknown."""
        return self._tools is None or bool(self._tools)

    @cached_property
    def quoted_names(self) -> Markers:
        """The names of the request's tools as JSON strings, none if they are unknown."""
        return Markers(json.dumps(name, ensure_ascii=False) for name in self._tools or ())

    def check(self, name: str, *, known: bool = False) -> None:
        """Check the tool name of a call, and set `named`.

        Args:
            known: whether the request must have this tool, because the name is the only sign of a tool call.

        Raises:
            NotACall: the name is invalid, or `known` or `known_only` is true and the request has no tool of this name.
        """
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise NotACall
        # Without a list of tools, any name is accepted.
        if (known or self.known_only) and self._tools is not None and name not in self._tools:
            raise NotACall
        self.named = True

    def tool(self, written: str) -> str:
        """Return the request's tool that the model means by `written`, else `written`.

        Models put a namespace before the name of a tool, as in `functions.f`.
        """
        if self._tools is None or written in self._tools:
            return written
        last = _NAMESPACE.sub("", written)
        return last if last in self._tools else written

    def tool_and_parameter(self, text: str) -> tuple[str, str]:
        """Return the tool and its parameter whose two names together are `text`.

        Raises:
            NotACall: the request has no such tool and parameter.
        """
        for tool in self._tools or ():
            if text.startswith(tool) and (name := text[len(tool) :]) and self.parameter(tool, name):
                return tool, name
        raise NotACall

    def schema(self, tool: str) -> Mapping[str, Any]:
        """Return the JSON Schema of a tool's arguments, {} if the tool is unknown."""
        schema = (self._tools or {}).get(self.tool(tool), {})
        return schema if isinstance(schema, Mapping) else {}

    def has(self, tool: str) -> bool:
        """Return whether the tools of the request are known and include `tool`."""
        return self._tools is not None and tool in self._tools

    def parameters(self, tool: str) -> Set[str]:
        """Return the names of the parameters in the schema of a tool."""
        properties = self.schema(tool).get("properties")
        return properties.keys() if isinstance(properties, Mapping) else set[str]()

    def parameter(self, tool: str, name: str) -> Mapping[str, Any]:
        """Return a parameter's JSON Schema with the tool's `$defs`; {} if it is unknown."""
        schema = self.schema(tool)
        return child_schema(schema, name, schema)

    def start(self, name: str) -> None:
        """Begin a call of the tool `name`, which `check` has accepted, with a new id."""
        if (tool := self.tool(name)) != name:
            self.repairs.add("namespace")
        self._events.append(ToolCallStart(self.calls, self._new_id(), tool))
        self.calls += 1
        self.begun = True
        # If the arguments of the previous call are incomplete, no later text can complete them.
        self.broken |= self.open_call
        self.open_call = True

    def arguments(self, fragment: str) -> None:
        """Add a fragment of the JSON text of the last tool call's arguments."""
        if fragment:
            self._events.append(ToolCallDelta(self.calls - 1, fragment))

    def end(self) -> None:
        """Mark the arguments of the last tool call as complete."""
        self.open_call = False
