"""gpt-oss: messages in channels, `<|channel|>CHANNEL to=RECIPIENT<|message|>...<|end|>`."""

import re

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Reading, Source
from helexa.neuron.parsers.values.json_call import read_arguments, take_surplus

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_FRAME = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN)
_FRAMES, _STRAYS = Markers(_FRAME), Markers(_FRAME[2:])
_MESSAGES, _ENDS = Markers([_MESSAGE]), Markers([_END, _CALL, _RETURN])
_HEADER_ENDS = Markers([_MESSAGE, *_ENDS.strings])
_ANY = re.compile("|".join(map(re.escape, _FRAME)))
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_MAX_HEADER = 512


class Harmony:
    """`analysis` messages are reasoning, messages addressed to a tool are calls, all others are text without control
    tokens.

    The format frames every answer, so it is parsed without tools too. Without offered tools, or without a JSON object,
    the body of a call is text. The framing consists of special tokens; the end tokens usually end the generation. The
    prompt ends within the first header, after `<|start|>assistant`.
    """

    name = "harmony"
    markers = frozenset(_FRAME)
    openers = _FRAME
    leading = (" to=",)

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse a message. See `Family.read`."""
        if (yield from source.marker(_STRAYS)):
            source.settle()
            return
        header, _ = yield from source.short(_HEADER_ENDS, _MAX_HEADER)
        source.settle()
        if not (yield from source.marker(_MESSAGES)):
            if len(header) > _MAX_HEADER or not _ANY.search(header):
                for text in _ANY.split(header):  # otherwise the text is a header without a message
                    output.text(text)
            return
        channel = found.group(1) if (found := _CHANNEL_NAME.search(header)) else ""
        recipient = found.group(1) if (found := _RECIPIENT.search(header)) else ""
        source.settle()
        if (recipient and channel != "analysis") or recipient.startswith(_FUNCTIONS):
            yield from _read_call(source, output, recipient.removeprefix(_FUNCTIONS))
        else:
            yield from _read_text(source, output, reasoning=channel == "analysis")


def _read_call(source: Source, output: Output, name: str) -> Reading[None]:
    yield from source.space()
    empty = (yield from source.upcoming(_ENDS)) or source.complete
    if not output.calls_count or not (empty or (yield from source.peek()) == "{"):
        output.text(source.give_back())
        yield from _read_text(source, output, reasoning=False)
        return
    output.check(name)
    if empty:  # no arguments
        output.start(name)
        output.arguments("{}")
        output.end()
    else:
        yield from read_arguments(source, output, name)
    yield from take_surplus(source)
    if (yield from source.marker(_ENDS)) or source.empty:
        source.settle()


def _read_text(source: Source, output: Output, *, reasoning: bool) -> Reading[None]:
    output.reasoning = reasoning

    def pass_on(piece: str) -> None:
        source.settle()
        (output.thought if reasoning else output.text)(piece)

    while (found := (yield from source.until(_FRAMES, pass_on))) and found not in (_START, _CHANNEL):
        yield from source.marker(_FRAMES)
        source.settle()
        if found in _ENDS.strings:
            break
    output.reasoning = False
