"""Tool calls written as text, for endpoints without native tool calls: prompt instructions and a parser.

The parser accepts two formats of tool calls:

* `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of Hermes and Qwen.
* `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, another format of Qwen. The first
  `<tool_call>` tag may be missing.

Reasoning is between `<think>` and `</think>`, at the beginning of a response or between calls.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
THINK, THINK_END = "<think>", "</think>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
FENCE = "```"

_TOKEN = re.compile("|".join((FENCE, CALL, FUNCTION)))


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the response's text, without calls and reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's reasoning, which the model wrote between `<think>` and `</think>`."""

    text: str


@dataclass(frozen=True, slots=True)
class UnparsedCall:
    """An unparsed tool call that the model wrote as text.

    Attributes:
        text: the text of the call, which `repair` can parse.
        verbatim: the call with its tags, as the model wrote it.
        closed: whether the response contained the end tag.
    """

    text: str
    verbatim: str
    closed: bool


Segment = Text | Thought | UnparsedCall


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

    Args:
        fences: whether a tool call in a fenced code block is treated as text. Set it for models with native tool
            calls, because they write a call in a code block only as an example.
    """

    def __init__(self, *, fences: bool) -> None:
        self._fences = fences
        self._fenced = False
        self._state = _State.START
        self._pending = ""  # text that may be part of a marker
        self._body: list[str] = []  # parts of the unfinished call

    def feed(self, text: str) -> list[Segment]:
        """Parse the next chunk of the response's text, and return the segments that are now known."""
        self._pending += text
        return list(self._segments())

    def finish(self) -> list[Segment]:
        """Return the last segments after the end of the response, including an unfinished tool call."""
        segments = list(self._segments())
        remaining, self._pending = self._pending, ""
        if self._state is _State.START:
            remaining = remaining.lstrip()
        if self._state in (_State.CALL, _State.FUNCTION):
            segments.append(self._call(remaining, ""))
        elif remaining:
            segments.append(Thought(remaining) if self._state is _State.THOUGHT else Text(remaining))
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
            yield Text(self._pending[:length])
            self._pending = self._pending[length:]


def _tail(text: str, *tokens: str) -> int:
    """Return how many characters at the end of `text` could be the beginning of one of `tokens`."""
    longest = max(map(len, tokens)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(token.startswith(text[-length:]) for token in tokens):
            return length
    return 0


def instructions(tools: Mapping[str, tuple[str, Mapping[str, Any]]]) -> str:
    """Return a section for the system prompt that describes the tools and how to write tool calls as text.

    Args:
        tools: description and JSON Schema of the arguments, by tool name.
    """
    lines = "\n".join(
        json.dumps({"type": "function", "function": {"name": name, "description": description, "parameters": schema}})
        for name, (description, schema) in tools.items()
    )
    return f"""# Tools

You can call these functions. Their signatures:
<tools>
{lines}
</tools>

To call one, write a JSON object with its name and arguments between {CALL} and {CALL_END} tags:
{CALL}
{{"name": "<function name>", "arguments": {{<arguments as a JSON object>}}}}
{CALL_END}
You may write several calls, one after the other. Write nothing after the last: the results come in the next message,
between {RESULT} and {RESULT_END} tags."""


def written_call(name: str, arguments: str) -> str:
    """Return a tool call as text between `<tool_call>` tags. `arguments` is a JSON object as text."""
    return f'{CALL}\n{{"name": {json.dumps(name)}, "arguments": {arguments or "{}"}}}\n{CALL_END}'


def written_result(content: str) -> str:
    """Return a tool result as text between `<tool_response>` tags."""
    return f"{RESULT}\n{content}\n{RESULT_END}"
