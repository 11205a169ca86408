"""Parse a model's output during generation into reasoning, tool calls and text."""

from collections.abc import Callable

from helexa.neuron.events import OutputEvent, TextDelta
from helexa.neuron.parsers.formats.tool_call_format import ToolCallFormat
from helexa.neuron.parsers.formats.untagged_calls import LEADING, LINES, read_untagged
from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output, Tools, random_call_id
from helexa.neuron.parsers.reasoning import ReasoningMarks
from helexa.neuron.parsers.source import NotACall, Reading, Source


class OutputParser:
    """Separates the output of a model into reasoning, tool calls and text.

    The caller passes the output in chunks to `push`. The sizes of the chunks have no effect on the result.

    Text that is not part of a tool call is returned unchanged. The parser drops:

    * markers, and the syntax around the names and arguments of tool calls,
    * white space around reasoning, between tool calls and after them, and before a tool call at the beginning of the
      output.

    The arguments of a tool call are validated and returned while they arrive. If the arguments become invalid or end
    too early, the call stays incomplete. The client then has invalid JSON, so it cannot run the call. The remaining
    output is returned as text.

    Reasoning must come before all text. If reasoning markers follow text, they are returned as text, with one
    exception: the model may write a closing marker without an opening marker in the prompt or output. The closing
    marker is then dropped, and the text before it becomes reasoning.

    Args:
        tool_call_format: parser of the model's tool-call format. None if tool calls are not parsed.
        reasoning: markers around the model's reasoning. None if reasoning is not parsed.
        in_reasoning: whether the prompt ends inside an open reasoning block.
        reasoned: whether the prompt ends after a closed reasoning block.
        untagged: whether tool calls in the form of plain JSON are accepted, until the model uses its tool-call format.
        tools: the tools of the request. None if the tools are unknown.
        new_id: function that returns the id for a new tool call.

    Attributes:
        markers: special tokens that the parser needs. The detokenizer must include them in the text.
    """

    def __init__(
        self,
        tool_call_format: ToolCallFormat | None,
        *,
        reasoning: ReasoningMarks | None = None,
        in_reasoning: bool = False,
        reasoned: bool = False,
        untagged: bool = False,
        tools: Tools | None = None,
        new_id: Callable[[], str] = random_call_id,
    ) -> None:
        self._format = tool_call_format
        self._reasoning = reasoning
        marks = {reasoning.open, reasoning.close} if reasoning else set[str]()
        self.markers: frozenset[str] = (tool_call_format.markers if tool_call_format else frozenset()) | marks
        openers, leading = (tool_call_format.openers, tool_call_format.leading) if tool_call_format else ((), ())
        self._untagged = frozenset((*LINES, *LEADING) if untagged else ())
        self._tagged_calls = False
        if untagged:
            openers, leading = (*openers, *LINES), (*leading, *LEADING)
        self._call_openers = Markers(openers)
        self._openers = self._call_openers if reasoned else Markers([*openers, *marks])
        self._first_openers = Markers([*openers, *leading, *marks])
        self._source = Source()
        self._output = Output(tools, new_id)
        self._in_plain_text = False  # the next text is plain text unless a marker begins in it
        self._reading = self._read(in_reasoning and reasoning is not None)
        next(self._reading)  # run to the first read of text

    @property
    def in_reasoning(self) -> bool:
        """Whether the parser is inside reasoning. The next text is then reasoning, unless a marker ends the reasoning.

        A generated token counts as a reasoning token if this value is true before or after its text is pushed.
        """
        return self._output.reasoning

    @property
    def call_is_open(self) -> bool:
        """Whether the arguments of the last tool call are incomplete.

        If this is true after `flush`, the arguments were cut off or are invalid.
        """
        return self._output.open_call

    @property
    def broken(self) -> bool:
        """Whether a tool call before the last one has incomplete arguments."""
        return self._output.broken

    def push(self, text: str) -> list[OutputEvent]:
        """Parse the next chunk of the output and return the new events.

        The parser holds back text that may be the beginning of a marker.
        """
        if self._in_plain_text and self._source.empty and self._openers.cannot_begin_in(text):
            return [TextDelta(text)] if text else []
        self._source.feed(text)
        next(self._reading, None)
        return self._output.drain()

    def flush(self, *, cut: bool = False) -> list[OutputEvent]:
        """End the output and return the remaining events, including those for text that was held back.

        Args:
            cut: whether the output ended because of a limit. In this case, a tool call without an end marker is
                incomplete.
        """
        self._source.ended, self._source.cut = True, cut
        return self.push("")

    def _read(self, in_reasoning: bool) -> Reading[None]:
        output = self._output
        if in_reasoning and self._reasoning is not None:
            yield from self._reasoning.read_inside(self._source, output)
            self._openers = self._call_openers
        opener = yield from self._skip_space(self._first_openers)
        while True:
            if not opener:
                self._in_plain_text = True
                opener = yield from self._source.until(self._openers, self._emit_text)
                self._in_plain_text = False
            if not opener:
                return
            opener = yield from self._parse_block(opener)

    def _parse_block(self, opener: str) -> Reading[str]:
        """Parse a block of reasoning or tool calls that begins with the marker `opener`.

        Return the opening marker of the next block if it directly follows this block. Otherwise, return "".
        """
        source = self._source
        if self._reasoning is not None and opener in (self._reasoning.open, self._reasoning.close):
            return (yield from self._parse_mark(self._reasoning, opener))
        try:
            if opener not in self._untagged:
                yield from self._parse_tagged()
            elif self._tagged_calls:
                source.take(source.at + len(opener))
                raise NotACall
            else:
                yield from read_untagged(source, self._output)
        except NotACall:
            self._emit_text(source.give_back())
            return ""
        if source.unsettled.strip():
            self._emit_text(source.give_back())
            return ""
        return (yield from self._skip_space(self._openers))

    def _parse_tagged(self) -> Reading[None]:
        assert self._format is not None
        calls = self._output.calls
        try:
            yield from self._format.read(self._source, self._output)
        finally:
            self._tagged_calls |= self._output.calls > calls

    def _parse_mark(self, marks: ReasoningMarks, mark: str) -> Reading[str]:
        source = self._source
        self._openers = self._call_openers
        if mark == marks.open and self._output.begun:
            source.take(source.at + len(mark))
            self._emit_text(source.give_back())
            return ""
        if mark == marks.open:
            yield from marks.read(source, self._output)
        else:
            self._output.was_reasoning()
            yield from marks.read_end(source)
        return (yield from self._skip_space(self._first_openers))

    def _skip_space(self, openers: Markers) -> Reading[str]:
        """Read white space, and return the marker after it if it is one of `openers`. Otherwise, return "".

        If no opening marker follows, the white space is returned to the client as text. At the end of an output with
        tool calls, the white space is dropped.
        """
        source = self._source
        if opener := (yield from source.upcoming(openers)):
            return opener
        yield from source.space()
        if not (opener := (yield from source.upcoming(openers))):
            space = source.give_back()
            if self._output.calls == 0 or (yield from source.peek()):
                self._emit_text(space)
        return opener

    def _emit_text(self, text: str) -> None:
        self._source.settle()
        self._output.text(text)
