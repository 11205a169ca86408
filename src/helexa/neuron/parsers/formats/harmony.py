"""Parse the Harmony format of gpt-oss.

All output consists of messages in channels: `<|channel|>CHANNEL to=RECIPIENT<|message|>...<|end|>`.
"""

import re

from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NO_MARKERS, Markers, Reading, Source
from helexa.neuron.parsers.values.json_call import read_arguments, take_surplus

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_FRAME = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN)
_FRAMES, _STRAY_MARKERS = Markers(_FRAME), Markers(_FRAME[2:])
_MESSAGES, _ENDS = Markers([_MESSAGE]), Markers([_END, _CALL, _RETURN])
_HEADER_ENDS = Markers([_MESSAGE, *_ENDS.strings])
_ANY = re.compile("|".join(map(re.escape, _FRAME)))
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_MAX_HEADER = 512


class Harmony:
    """The Harmony format: all output consists of messages with a header and a channel.

    * A message in the channel `analysis` is reasoning.
    * A message with a tool as its recipient is a tool call if the request has tools, and if the content is a JSON
      object or empty.
    * Any other message is text.

    Special tokens mark the headers and ends of messages. The tokens `<|call|>` and `<|return|>` usually end the
    generation. The prompt ends with `<|start|>assistant`, which begins the header of the first message. The parser is
    also used for requests without tools, because text is enclosed in messages, too.
    """

    name = "harmony"
    markers = frozenset(_FRAME)
    openers = _FRAME
    leading = (" to=",)
    closers = (_END, _CALL, _RETURN)

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one message. Text outside of messages is added to `output` as plain text."""
        if (yield from source.marker(_STRAY_MARKERS)):
            source.settle()
            return
        header, _ = yield from source.short(_HEADER_ENDS, _MAX_HEADER)
        source.settle()
        if not (yield from source.marker(_MESSAGES)):
            # A header is short and contains markers. Other text is an answer outside of a message.
            if len(header) > _MAX_HEADER or not _ANY.search(header):
                for text in _ANY.split(header):  # otherwise the text is a header without a message
                    output.text(text)
            return
        channel = match.group(1) if (match := _CHANNEL_NAME.search(header)) else ""
        recipient = match.group(1) if (match := _RECIPIENT.search(header)) else ""
        source.settle()
        # In the channel `analysis`, only a recipient with the prefix `functions.` is a tool of the request.
        if (recipient and channel != "analysis") or recipient.startswith(_FUNCTIONS):
            yield from _read_call(source, output, recipient.removeprefix(_FUNCTIONS))
        else:
            yield from _read_text(source, output, reasoning=channel == "analysis", final=channel == "final")


def _read_call(source: Source, output: Output, name: str) -> Reading[None]:
    yield from source.space()
    empty = (yield from source.upcoming(_ENDS)) or source.complete
    # Without tools in the request, or without JSON as its content, a message to a tool is text.
    if not output.may_call or not (empty or (yield from source.peek()) == "{"):
        output.text(source.give_back())
        yield from _read_text(source, output, reasoning=False)
        return
    output.check(name)
    if empty:  # no arguments
        output.start(name)
        output.arguments("{}")
        output.end()
    else:
        yield from read_arguments(source, output, name, _ENDS)
    yield from take_surplus(source)
    if (yield from source.marker(_ENDS)) or source.empty:
        source.settle()


def _read_text(source: Source, output: Output, *, reasoning: bool, final: bool = False) -> Reading[None]:
    output.reasoning = reasoning
    # In a structured final message, the grammar decides. A marker may be part of a JSON string.
    frames = NO_MARKERS if final and output.structured else _FRAMES

    def pass_on(chunk: str) -> None:
        source.settle()
        (output.thought if reasoning else output.text)(chunk)

    while (marker := (yield from source.until(frames, pass_on))) and marker not in (_START, _CHANNEL):
        yield from source.marker(_FRAMES)
        source.settle()
        if marker in _ENDS.strings:
            break
    output.reasoning = False
