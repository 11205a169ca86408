"""Tool calls and reasoning that models write as text between markers.

The parser accepts two formats of tool calls:

* `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of Hermes and Qwen.
* `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, another format of Qwen. The first
  `<tool_call>` tag may be missing.

Reasoning is between `<think>` and `</think>`, at the beginning of a response or between calls.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from helexa.acp.conversation_and_events import AssistantMessage, Message, Text, ToolResult, UserMessage
from helexa.acp.providers.requests_and_events import (
    AnswerDelta,
    CallDelta,
    End,
    ModelEvent,
    ModelRequest,
    ReasoningDelta,
)
from helexa.acp.providers.tool_call_repair import MalformedCall, ParsedCall, repair

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
THINK, THINK_END = "<think>", "</think>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
FENCE = "```"

_TOKEN = re.compile("|".join((FENCE, CALL, FUNCTION)))


@dataclass(frozen=True, slots=True)
class AnswerText:
    """A piece of a response's text that is neither a tool call nor reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the reasoning that a model writes between `<think>` and `</think>`."""

    text: str


@dataclass(frozen=True, slots=True)
class UnparsedCall:
    """An unparsed tool call that the model wrote as text."""

    text: str  # the text of the call, which `repair` can parse
    verbatim: str  # the call with its tags, as the model wrote it
    closed: bool  # whether the response contained the end tag


Segment = AnswerText | Thought | UnparsedCall


class _State(Enum):
    START = auto()  # start of the response, or after reasoning or a call: skip white space, accept <think>
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()
    FUNCTION = auto()


_END = {_State.THOUGHT: THINK_END, _State.CALL: CALL_END, _State.FUNCTION: FUNCTION_END}


class MarkerParser:
    """Splits the streamed text of a response into text, reasoning and tool calls.

    Text is returned as soon as it cannot be part of a marker such as `<tool_call>`.
    """

    def __init__(self, *, fences: bool) -> None:
        # Whether a tool call in a fenced code block is treated as text. This is True for models with native tool calls,
        # because such a model writes a call in a code block only as an example.
        self._fences = fences
        self._fenced = False
        self._state = _State.START
        self._pending = ""  # text that may be part of a marker
        self._body: list[str] = []  # parts of the unfinished call

    def feed(self, text: str) -> list[Segment]:
        """Parse the next chunk of text and return the new segments.

        Text and reasoning are returned in pieces, as they arrive. A tool call is returned when it is complete.
        """
        self._pending += text
        return list(self._segments())

    def finish(self) -> list[Segment]:
        """Return the last segments, including an unfinished tool call."""
        segments = list(self._segments())
        remaining, self._pending = self._pending, ""
        if self._state is _State.START:
            remaining = remaining.lstrip()
        if self._state in (_State.CALL, _State.FUNCTION):
            segments.append(self._call(remaining, ""))
        elif remaining:
            segments.append(Thought(remaining) if self._state is _State.THOUGHT else AnswerText(remaining))
        self._state = _State.TEXT
        return segments

    def _segments(self) -> Iterator[Segment]:
        previous = None
        while previous != (previous := (self._state, len(self._pending))):
            match self._state:
                case _State.START:
                    self._begin()
                case _State.THOUGHT:
                    yield from self._until_end(Thought)
                case _State.TEXT:
                    yield from self._text()
                case _State.CALL | _State.FUNCTION:
                    yield from self._until_end(None)

    def _begin(self) -> None:
        text = self._pending.lstrip()
        if text.startswith(THINK):
            self._pending = text.removeprefix(THINK)
            self._state = _State.THOUGHT
        elif not THINK.startswith(text):
            self._pending = text
            self._state = _State.TEXT

    def _text(self) -> Iterator[Segment]:
        start = 0
        for token in _TOKEN.finditer(self._pending):
            if token[0] == FENCE:
                self._fenced = self._fences and not self._fenced
            elif not self._fenced:
                yield from self._emit_text(token.start())
                self._pending = self._pending[len(token[0]) :]
                self._state = _State.CALL if token[0] == CALL else _State.FUNCTION
                return
            start = token.end()
        yield from self._emit_text(max(start, len(self._pending) - _tail(self._pending, FENCE, CALL, FUNCTION)))

    def _until_end(self, kind: type[Thought] | None) -> Iterator[Segment]:
        end = _END[self._state]
        text, end_tag, remaining = self._pending.partition(end)
        if end_tag:
            self._pending = remaining
            if kind is None:
                yield self._call(text, end)
            elif text:
                yield kind(text)
            self._state = _State.START
            return
        ready = len(text) - _tail(text, end)
        text, self._pending = text[:ready], text[ready:]
        if kind is None:
            self._body.append(text)
        elif text:
            yield kind(text)

    def _call(self, remaining: str, end: str) -> UnparsedCall:
        inner = "".join(self._body) + remaining
        self._body.clear()
        if self._state is _State.CALL:
            return UnparsedCall(inner, f"{CALL}{inner}{end}", bool(end))
        markup = f"{FUNCTION}{inner}{end}"
        return UnparsedCall(markup, markup, bool(end))

    def _emit_text(self, length: int) -> Iterator[Segment]:
        if length:
            yield AnswerText(self._pending[:length])
            self._pending = self._pending[length:]


def _tail(text: str, *tokens: str) -> int:
    """Return how many characters at the end of `text` could begin one of `tokens`."""
    longest = max(map(len, tokens)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(token.startswith(text[-length:]) for token in tokens):
            return length
    return 0


def instructions(tools: Mapping[str, tuple[str, Mapping[str, Any]]]) -> str:
    """Return instructions for the system prompt of a model that writes calls as text.

    `tools` maps the name of each tool to its description and the JSON Schema of its arguments.
    """
    lines = "\n".join(
        json.dumps({"type": "function", "function": {"name": name, "description": description, "parameters": schema}})
        for name, (description, schema) in tools.items()
    )
    example = next(iter(tools), "function")
    return f"""# Tools

You can call these functions:
<tools>
{lines}
</tools>

To call a function, write its name and arguments as JSON between {CALL} and {CALL_END}. Example:
{CALL}
{{"name": "{example}", "arguments": {{"<argument>": "<value>"}}}}
{CALL_END}
You can write several calls. Stop after the last call: the results are in the next message, between {RESULT} and
{RESULT_END}."""


def _written_call(name: str, arguments: str) -> str:
    """Return a tool call as text between `<tool_call>` tags; `arguments` is JSON."""
    return f'{CALL}\n{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}\n{CALL_END}'


def _written_result(content: str) -> str:
    """Return a tool result as text between `<tool_response>` tags."""
    return f"{RESULT}\n{content}\n{RESULT_END}"


def with_written_calls(request: ModelRequest) -> ModelRequest:
    """Return `request`, converted for an endpoint without native tool calls.

    In the returned request, the system prompt describes the tools. The messages contain tool calls and results as text.
    """
    tools = {tool.name: (tool.description, tool.schema) for tool in request.tools}
    return dataclasses.replace(
        request,
        system=f"{request.system}\n\n{instructions(tools)}".strip(),
        messages=[_written(message) for message in request.messages],
        tools=(),
    )


def _written(message: Message) -> Message:
    if isinstance(message, AssistantMessage) and message.calls:
        calls = [_written_call(call.name, call.arguments) for call in message.calls]
        return AssistantMessage(message.id, "\n".join([message.text, *calls] if message.text else calls))
    if isinstance(message, ToolResult):
        return UserMessage(message.call_id, (Text(_written_result(message.content)), *message.images))
    return message


class MarkerReader:
    """Extracts tool calls and reasoning from the text of a response.

    Args:
        request: the original request with its tools.
        calls_requested: whether the prompt asks the model to write tool calls as text. If False, text between markers
            counts as a tool call only under three conditions: the text is a valid call, it is not in a code block, and
            the response has no native tool calls.
    """

    def __init__(self, request: ModelRequest, *, calls_requested: bool) -> None:
        self._schemas = {tool.name: tool.schema for tool in request.tools}
        self._calls_requested = calls_requested
        self._parser = MarkerParser(fences=not calls_requested)
        self._has_native_calls = False
        self._call_count = 0
        self._doubtful: list[tuple[UnparsedCall, ParsedCall]] = []

    def read(self, event: ModelEvent) -> Iterator[ModelEvent]:
        """Yield the events for one event of the response.

        A text chunk is split into text, reasoning and tool calls, each as a separate event. Before `End`, the remaining
        text is yielded. If the text contained calls, `End` has the reason `tool_calls` instead of `stop`.
        """
        match event:
            case AnswerDelta(text):
                yield from self._events(self._parser.feed(text))
            case End(reason, extras):
                yield from self._events(self._parser.finish())
                for unparsed, call in self._doubtful:
                    yield AnswerDelta(unparsed.verbatim) if self._has_native_calls else self._call(call)
                yield End("tool_calls" if self._call_count and reason == "stop" else reason, extras)
            case _:
                self._has_native_calls = self._has_native_calls or isinstance(event, CallDelta)
                yield event

    def _events(self, segments: list[Segment]) -> Iterator[ModelEvent]:
        for segment in segments:
            match segment:
                case UnparsedCall():
                    yield from self._unparsed_call(segment)
                case Thought(text):
                    yield ReasoningDelta(text)
                case _:
                    yield AnswerDelta(segment.text)

    def _unparsed_call(self, unparsed: UnparsedCall) -> Iterator[ModelEvent]:
        if not unparsed.text.strip():
            return
        call = repair("", unparsed.text, self._schemas)
        if self._calls_requested:
            yield self._call(call, unparsed.text)
        elif isinstance(call, ParsedCall) and call.name in self._schemas:
            self._doubtful.append((unparsed, call))
        else:
            yield AnswerDelta(unparsed.verbatim)

    def _call(self, call: ParsedCall | MalformedCall, text: str = "") -> CallDelta:
        index, self._call_count = self._call_count, self._call_count + 1
        if isinstance(call, MalformedCall):
            return CallDelta(index, arguments=text)
        return CallDelta(index, name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))
