"""Parse formats whose whole output consists of messages with headers.

These formats are Harmony, the format of gpt-oss, and the format of Muse Glimmer.
"""

import re
from typing import Literal

from helexa.neuron.parsers.formats.tagged_calls import CallTags, TaggedCalls
from helexa.neuron.parsers.json_call import add_call, read_arguments, take_surplus
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import NO_MARKERS, Markers, NotACall, Reading, Source

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_EOM, _EOT = "<|eom|>", "<|eot|>"
_UNMARKED_CALL = re.compile(r"\bto=[^<{]*(?:<[^{]*)?(\{.*)\Z", re.DOTALL)
_MESSAGES = Markers([_MESSAGE])
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_UNMARKED = re.compile(re.escape(_CHANNEL) + r"\s*(analysis|final)\s+(?!\s|to=)((?:(?!<\|).)+)\Z", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_MAX_HEADER = 512

Kind = Literal["reasoning", "text", "final", "call"]


class MessageFormat:
    """A tool-call format whose whole output consists of messages with headers.

    The header of a message decides how the parser returns its content:

    * If the header marks reasoning, the content is reasoning.
    * If the header names a tool, the content is a tool call if the request has tools and the content has the form of a
      call.
    * Otherwise, the content is text.

    Special tokens mark the headers and ends of messages. The prompt ends with `<|start|>assistant`, which begins the
    header of the first message. The parser is also used for requests without tools, because text is enclosed in
    messages, too.
    """

    name: str
    frame: tuple[str, ...]  # all markers of the format: special tokens that begin, divide and end headers and messages
    begins: tuple[str, ...]  # the markers that may begin a header
    closers: tuple[str, ...]  # the markers at the end of a message
    thought_end: str  # text from the end of reasoning to the header of the next message
    final_header: str  # the header of an answer

    leading: tuple[str, ...] = (" to=",)

    def __init__(self) -> None:
        self.markers = frozenset(self.frame)
        self.openers = self.frame
        self._frames = Markers(self.frame)
        self._stray = Markers(marker for marker in self.frame if marker not in self.begins)
        self._ends = Markers(self.closers)
        self._header_ends = Markers([_MESSAGE, *self.closers])
        self._any = re.compile("|".join(map(re.escape, self.frame)))

    def addressed(self, header: str) -> tuple[Kind, str]:
        """Return the kind of the message with this header, and its tool.

        The tool is "" if the message is no call.
        """
        raise NotImplementedError

    def unmarked(self, header: str) -> tuple[Kind, str, str] | None:
        """Return kind, tool and text of a message that lacks `<|message|>`.

        None if `header` does not contain the text of a message.
        """
        return None

    def read_call(self, source: Source, output: Output, name: str) -> Reading[bool]:
        """Parse a call of the tool `name`. Return False if the content is no call.

        Raises:
            NotACall: the call cannot be parsed.
        """
        raise NotImplementedError

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one message. Text outside of messages is added to `output` as plain text."""
        if (yield from source.marker(self._stray)):
            source.settle()
            return
        header, _ = yield from source.short(self._header_ends, _MAX_HEADER)
        source.settle()
        if not (yield from source.marker(_MESSAGES)):
            if (message := self.unmarked(header)) is not None:
                output.repairs.add("header")
                kind, name, text = message
                if not (kind == "call" and output.may_call and add_call(output, name, text)):
                    (output.thought if kind == "reasoning" else output.text)(text)
                yield from self._read_text(source, output, "text" if kind == "call" else kind)
                return
            # A header without a message is dropped. A header is short and contains markers. Other text is an answer
            # outside of a message.
            if len(header) > _MAX_HEADER or not self._any.search(header):
                for text in self._any.split(header):
                    output.text(text)
            return
        kind, name = self.addressed(header)
        source.settle()
        if kind != "call":
            yield from self._read_text(source, output, kind)
            return
        yield from source.space()
        # A message to a tool is text if the request has no tools, or if its content does not have the form of a call.
        if not (output.may_call and (yield from self.read_call(source, output, name))):
            output.text(source.give_back())
            yield from self._read_text(source, output, "text")
            return
        yield from take_surplus(source)
        if (yield from source.marker(self._ends)) or source.empty:
            source.settle()

    def _read_text(self, source: Source, output: Output, kind: Kind) -> Reading[None]:
        output.reasoning = kind == "reasoning"
        # A grammar decides where a structured final message ends. A marker in it may be part of a JSON string.
        frames = NO_MARKERS if kind == "final" and output.structured else self._frames
        add = output.thought if output.reasoning else output.text

        def pass_on(chunk: str) -> None:
            source.settle()
            add(chunk)

        while (marker := (yield from source.until(frames, pass_on))) and marker not in self.begins:
            yield from source.marker(self._frames)
            source.settle()
            if marker in self.closers:
                break
        output.reasoning = False


_CHANNELS: dict[str, Kind] = {"analysis": "reasoning", "final": "final", "commentary": "text"}


class Harmony(MessageFormat):
    """The Harmony format of gpt-oss.

    A message is `<|channel|>CHANNEL to=RECIPIENT<|message|>...<|end|>`.
    A message in the channel `analysis` is reasoning. The content of a call is a JSON object, or empty. The tokens
    `<|call|>` and `<|return|>` usually end the generation.
    """

    name = "harmony"
    frame = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN)
    begins = (_START, _CHANNEL)
    closers = (_END, _CALL, _RETURN)
    thought_end = f"{_END}{_START}assistant"
    final_header = f"{_CHANNEL}final{_MESSAGE}"

    def addressed(self, header: str) -> tuple[Kind, str]:
        """Return the kind of the message with this header, and its tool ("" if no call)."""
        names = [name for name in _CHANNEL_NAME.findall(header) if name in _CHANNELS]
        channel = names[-1] if names else ""  # the last one, because models write two headers by mistake
        recipient = match.group(1) if (match := _RECIPIENT.search(header)) else ""
        # In the channel `analysis`, only a recipient with the prefix `functions.` is a tool of the request.
        if (recipient and channel != "analysis") or recipient.startswith(_FUNCTIONS):
            return "call", recipient.removeprefix(_FUNCTIONS)
        return _CHANNELS.get(channel, "text"), ""

    def unmarked(self, header: str) -> tuple[Kind, str, str] | None:
        """Return kind, tool and text of a message that lacks `<|message|>`.

        None if `header` does not contain the text of a message.
        """
        match = _UNMARKED.search(header)
        # Search for a recipient only before the text, because `to=` in the text is no recipient.
        if match and not _RECIPIENT.search(header[: match.start(2)]):
            return _CHANNELS[match[1]], "", match[2]
        call = _UNMARKED_CALL.search(header)
        return (*self.addressed(header[: call.start(1)]), call[1]) if call else None

    def read_call(self, source: Source, output: Output, name: str) -> Reading[bool]:
        """Parse the arguments of a call, which may be missing.

        Return False if the message has other content than a JSON object.
        """
        empty = (yield from source.upcoming(self._ends)) or source.complete
        if not (empty or (yield from source.peek()) == "{"):
            return False
        output.check(name)
        if empty:  # no arguments
            output.start(name)
            output.arguments("{}")
            output.end()
        else:
            yield from read_arguments(source, output, name, self._ends)
        return True


_ATEM_OPEN, _ATEM_INVOKE = "<atem:function_calls>", '<atem:invoke name="'
_ATEM_BEGINS = Markers([_ATEM_OPEN, _ATEM_INVOKE])


class MuseGlimmer(MessageFormat):
    """The format of Muse Glimmer: `to=RECIPIENT<|message|>...<|eom|>`.

    A message to `self` is reasoning, and a message to `user`, or without a recipient, is an answer. Calls have one tag
    per argument. `<|eot|>` ends the generation.
    """

    name = "muse_glimmer"
    frame = (_START, _MESSAGE, _EOM, _EOT)
    begins = (_START,)
    closers = (_EOM, _EOT)
    thought_end = f"{_EOM}{_START}assistant"
    final_header = f" to=user{_MESSAGE}"
    calls = TaggedCalls(
        "muse_glimmer",
        _ATEM_OPEN,
        CallTags(
            *(_ATEM_INVOKE, '">', '<atem:parameter name="', '">', "", "</atem:parameter>", "</atem:invoke>"),
            "</atem:function_calls>",
        ),
    )

    def addressed(self, header: str) -> tuple[Kind, str]:
        """Return the kind of the message with this header, and its tool ("" if no call)."""
        recipient = match.group(1) if (match := _RECIPIENT.search(header)) else "user"
        if recipient in ("self", "user"):
            return ("reasoning" if recipient == "self" else "final"), ""
        return "call", recipient

    def read_call(self, source: Source, output: Output, name: str) -> Reading[bool]:
        """Parse a message's calls. Return False if the message begins without a call tag.

        The tags also contain the names of the tools, so `name` is only checked.
        """
        begins = yield from source.upcoming(_ATEM_BEGINS)
        if not begins and not source.ended:
            return False
        output.check(name)  # sets `output.named`, so that the unfinished call is dropped if the output ends here
        if not begins:
            raise NotACall
        yield from self.calls.read(source, output)
        return True
