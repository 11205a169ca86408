"""Run an output parser over text in pieces, and join its events."""

from collections.abc import Iterable
from itertools import count

from helexa.neuron.output_events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    WasReasoning,
)
from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS
from helexa.neuron.parsers.output import Tools
from helexa.neuron.parsers.parser import OutputParser
from helexa.neuron.parsers.reasoning import ReasoningMarks

THINK = ReasoningMarks("<think>", "</think>")

TOOLS: Tools = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
    },
    "write_file": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}, "lines": {"type": "array"}},
    },
    "ping": {"type": "object", "properties": {}},
}

# Formats whose parsers and grammars share nearly all code with those of another format: tested in full every night.
SIMILAR_FORMATS = {"granite", "hunyuan", "kimi_k2", "lfm2", "minimax_m2", "muse_glimmer", "nemotron", "olmo3"}
SIMILAR_FORMATS |= {"cohere", "command_r", "phi4_mini", "seed_oss"}
DAILY_FORMATS = [name for name in TOOL_CALL_FORMATS if name not in SIMILAR_FORMATS]

MESSAGE_FORMATS = ("harmony", "muse_glimmer")  # their output consists of messages with headers

# A joined event: `("text", ...)`, `("thought", ...)` or `("call", name, arguments)`.
JoinedEvent = tuple[str, ...]


def parser(
    format_name: str | None, tools: Tools | None = TOOLS, *, in_reasoning: bool = False, reasoned: bool = False
) -> OutputParser:
    """Return a parser for tool-call format `format_name`, whose call ids are numbered from 0."""
    numbers = count()
    return OutputParser(
        TOOL_CALL_FORMATS[format_name] if format_name else None,
        reasoning=None if format_name in MESSAGE_FORMATS else THINK,
        in_reasoning=in_reasoning,
        reasoned=reasoned,
        untagged=format_name == "hermes",
        tools=tools,
        new_id=lambda: f"call_{next(numbers)}",
    )


def parse_pieces(reader: OutputParser, pieces: Iterable[str]) -> list[JoinedEvent]:
    """Parse `pieces` and return the events, with adjacent events of the same kind joined."""
    events = [event for piece in pieces for event in reader.push(piece)] + reader.flush()
    return join_events(events)


def join_events(events: Iterable[OutputEvent]) -> list[JoinedEvent]:
    """Return the events, with adjacent events of the same kind joined."""
    items: list[JoinedEvent] = []
    calls, ids = 0, set[str]()
    for event in events:
        kind = items[-1][0] if items else ""
        match event:
            case TextDelta(text):
                assert text
                items.append(("text", items.pop()[1] + text) if kind == "text" else ("text", text))
            case ReasoningDelta(text):
                assert text
                items.append(("thought", items.pop()[1] + text) if kind == "thought" else ("thought", text))
            case ToolCallStart(index, id, name):
                assert index == calls and id not in ids
                ids.add(id)
                calls += 1
                items.append(("call", name, ""))
            case ToolCallDelta(index, arguments):
                assert arguments and index == calls - 1 and kind == "call"
                items.append(("call", items[-1][1], items.pop()[2] + arguments))
            case WasReasoning():
                pass
    return items


def pieces_at(text: str, cuts: Iterable[int]) -> list[str]:
    """Return `text`, split at the positions `cuts`."""
    ends = [*sorted(cuts), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
