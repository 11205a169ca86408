"""gpt-oss: messages in channels, `<|channel|>CHANNEL to=RECIPIENT<|message|>...<|end|>`."""

import re

from helexa.neuron.parsers.json_call import read_arguments
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NotACall, Reading, Source

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_HEADER_ENDS = Markers([_MESSAGE, _END, _CALL, _RETURN])
_MESSAGES = Markers([_MESSAGE])
_BODY_ENDS, _ENDS = Markers([_END, _CALL, _RETURN, _START, _CHANNEL]), Markers([_END, _CALL, _RETURN])
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_MAX_HEADER = 512


class Harmony:
    """`analysis` is reasoning, what is addressed to a tool a call, and all else text.

    It frames every answer, so that it is needed without tools too: with none known, a call is text. All of a message's
    framing is special tokens, so that the end tokens among them end the generation as a rule. The prompt ends within
    the first header, behind `<|start|>assistant`.
    """

    name = "harmony"
    markers = frozenset({_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN})
    openers = (_START, _CHANNEL)
    leading = (" to=",)

    def read(self, source: Source, output: Output) -> Reading[None]:
        """As `Family` says."""
        header = yield from _read_header(source)
        channel = found.group(1) if (found := _CHANNEL_NAME.search(header)) else ""
        recipient = found.group(1) if (found := _RECIPIENT.search(header)) else ""
        if (recipient and channel != "analysis") or recipient.startswith(_FUNCTIONS):
            yield from _read_call(source, output, recipient.removeprefix(_FUNCTIONS))
            return
        source.settle()
        reasoning = channel == "analysis"
        output.reasoning = reasoning

        def pass_on(piece: str) -> None:
            source.settle()
            (output.thought if reasoning else output.text)(piece)

        yield from source.until(_BODY_ENDS, pass_on)
        yield from source.marker(_ENDS)
        source.settle()
        output.reasoning = False


def _read_header(source: Source) -> Reading[str]:
    """Take a message up to its body; its header."""
    pieces: list[str] = []
    length = 0

    def collect(piece: str) -> None:
        nonlocal length
        pieces.append(piece)
        length += len(piece)
        if length > _MAX_HEADER:
            raise NotACall

    if (yield from source.until(_HEADER_ENDS, collect)) != _MESSAGE:
        raise NotACall
    yield from source.marker(_MESSAGES)
    return "".join(pieces)


def _read_call(source: Source, output: Output, name: str) -> Reading[None]:
    output.check(name)
    yield from source.space()
    if (yield from source.upcoming(_ENDS)):  # no arguments at all
        output.start(name)
        output.arguments("{}")
        output.end()
    else:
        yield from read_arguments(source, output, name)
    source.settle()
    yield from source.space()
    yield from source.marker(_ENDS)
    source.settle()
