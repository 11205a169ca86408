"""Random tool calls with mistakes, cut at any position: no marker leaks, and complete arguments are valid JSON.

`HELEXA_TOOL_CORPUS` sets the number of outputs per format.
"""

import json
from random import Random

import pytest

from helexa.neuron.engine.ipc.messages import TokenOutput
from helexa.neuron.output_events import OutputEvent
from helexa.neuron.parsers.argument_values import strict_loads
from helexa.neuron.parsers.formats.tool_call_format import TOOL_CALL_FORMATS
from helexa.neuron.parsers.parser import OutputParser
from helexa.neuron.requests.answer_reader import AnswerForm, AnswerReader
from helexa.neuron.text.model_text import ModelText
from neuron.parsers.piecewise_parsing import (
    MESSAGE_FORMATS,
    SIMILAR_FORMATS,
    TOOLS,
    JoinedEvent,
    join_events,
    parser,
    pieces_at,
)
from neuron.parsers.tool_corpus import TAGGED, Output, outputs
from neuron.scripted_engine import byte_tokenizer
from nightly import cases, daily

COUNT = cases(12, 300, "HELEXA_TOOL_CORPUS")
CUTS = cases(2, 6)  # positions at which each output is cut
FORMATS = [*sorted(TOOL_CALL_FORMATS), "untagged", "mistral_named"]
PARSERS = {"untagged": "hermes", "mistral_named": "mistral"}
TEXTS: dict[str, ModelText] = {}


def parse(format_name: str, pieces: list[str], *, cut: bool = False) -> tuple[list[JoinedEvent], OutputParser]:
    reader = parser(PARSERS.get(format_name, format_name))
    events = [event for piece in pieces for event in reader.push(piece)] + reader.flush(cut=cut)
    return join_events(events), reader


def tokens_parsed(format_name: str, text: str, size: int, finish: str) -> tuple[list[JoinedEvent], str]:
    """Return the events and the finish reason of an `AnswerReader` that gets `size` tokens per output."""
    known = TOOL_CALL_FORMATS[PARSERS.get(format_name, format_name)]
    if known.name not in TEXTS:
        marks = () if known.name in MESSAGE_FORMATS else ("<think>", "</think>")
        TEXTS[known.name] = ModelText(byte_tokenizer(*sorted(known.markers), *marks), "", {})
        TEXTS[known.name].output_format.tool_call_format = known
    model = TEXTS[known.name]
    reader = AnswerReader(model, [0], form=AnswerForm(tools=TOOLS))
    tokens = model.tokenizer.encode(text)
    steps = [TokenOutput(id=1, tokens=tokens[at : at + size]) for at in range(0, len(tokens), size)]
    last = TokenOutput(id=1, finish="length" if finish == "length" else "stop")
    events: list[OutputEvent] = [event for step in (*steps, last) for event in reader.read(step)]
    return join_events(events), reader.reason(last)


def check_no_leak(format_name: str, output: Output, text: str, events: list[JoinedEvent], reason: str) -> None:
    """Check that the text has no markers unless it is the whole call, and that complete calls have valid arguments."""
    known = TOOL_CALL_FORMATS[PARSERS.get(format_name, format_name)]
    shown = "".join(event[1] for event in events if event[0] == "text")
    leaks = [marker for marker in (*known.markers, *known.openers, *known.closers) if marker in shown]
    assert not leaks or (reason == "stop" and text.endswith(shown)), (text, events)
    if reason == "tool_calls":
        assert all(isinstance(strict_loads(event[2]), dict) for event in events if event[0] == "call"), (text, events)
    if reason == "length":
        assert not leaks, (text, events)


@pytest.mark.parametrize("format_name", daily({*FORMATS} - SIMILAR_FORMATS, FORMATS))
def test_recorded_tool_calls_with_mistakes_are_repaired(format_name: str):
    random = Random(format_name)
    for output in outputs(format_name, random, COUNT):
        whole, reader = parse(format_name, [output.text])
        cuts = sorted(random.randrange(len(output.text)) for _ in range(random.randrange(20)))
        assert parse(format_name, list(output.text))[0] == whole, output
        assert parse(format_name, pieces_at(output.text, cuts))[0] == whole, output
        assert not reader.call_is_open and not reader.broken, (output, whole)
        assert output.mistake or not reader.repairs, (output, reader.repairs)
        read = [(event[1], strict_loads(event[2])) for event in whole if event[0] == "call"]
        assert read == output.calls, (output, whole)
        assert [event for event in whole if event[0] == "text"] == [], (output, whole)
        for size in (1, random.randrange(2, 64)):
            assert tokens_parsed(format_name, output.text, size, "stop") == (whole, "tool_calls"), output


@pytest.mark.parametrize("format_name", daily({*FORMATS} - SIMILAR_FORMATS, FORMATS))
def test_tool_calls_cut_off_anywhere_leak_no_markers_and_no_invalid_arguments(format_name: str):
    random = Random(format_name)
    for output in outputs(format_name, random, COUNT):
        for _ in range(CUTS):
            text = output.text[: random.randrange(1, len(output.text))]
            for finish in ("length", "stop"):
                whole, _ = parse(format_name, [text], cut=finish == "length")
                assert parse(format_name, list(text), cut=finish == "length")[0] == whole, text
                events, reason = tokens_parsed(format_name, text, random.randrange(1, 9), finish)
                assert events == whole, text
                assert reason in ((finish,) if finish == "length" else ("stop", "tool_calls"))
                check_no_leak(format_name, output, text, events, reason)
                calls = [event for event in events if event[0] == "call"]
                for event, (name, arguments) in zip(calls, output.calls, strict=False):
                    assert event[1] == name
                    if reason == "tool_calls":
                        read = json.loads(event[2])
                        # With one tag per argument, the output may end after any parameter.
                        kept = {key: arguments[key] for key in read} if format_name in TAGGED else arguments
                        # In Harmony, a message without content is a call without arguments.
                        assert output.mistake or read == kept or (format_name, read) == ("harmony", {}), (text, events)
