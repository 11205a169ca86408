"""Parse a model's output during generation into reasoning, tool calls and text."""

from collections.abc import Callable

from helexa.neuron.events import OutputEvent, TextDelta
from helexa.neuron.parsers.call_ids import OPENAI_IDS
from helexa.neuron.parsers.formats.harmony import Harmony
from helexa.neuron.parsers.formats.tool_call_format import ToolCallFormat
from helexa.neuron.parsers.formats.untagged_calls import LEADING, LINES, read_untagged
from helexa.neuron.parsers.markers import NO_MARKERS, Markers
from helexa.neuron.parsers.output import Output, Tools
from helexa.neuron.parsers.reasoning import ReasoningMarks
from helexa.neuron.parsers.source import NotACall, Reading, Source


class OutputParser:
    """Separates the output of a model into reasoning, tool calls and text.

    The caller passes the output in chunks to `push`. The sizes of the chunks have no effect on the result.

    Text that is not part of a tool call is returned unchanged. The parser drops:

    * markers, and the syntax around the names and arguments of tool calls,
    * white space around reasoning, between tool calls and after them, and before a tool call at the beginning of the
      output.

    The arguments of a tool call are repaired and returned while they arrive, so that complete arguments are valid JSON.
    Three kinds of tool calls have no complete arguments:

    * A text that is not recognized as a tool call before its arguments begin is returned as text, with its markers.
    * If the output ends before the arguments of a call begin, because of a limit or after another call, the beginning
      of the call is dropped.
    * If the arguments end too early or cannot be repaired, the call stays incomplete, and the rest of the call is
      dropped. The client then has invalid JSON, so it cannot run the call.

    Reasoning must come before all text. If reasoning markers follow text, they are returned as text, with one
    exception: the model may write a closing marker without an opening marker in the prompt or output. The closing
    marker is then dropped, and the text before it becomes reasoning.

    A tool call inside reasoning is a part of the reasoning, unless the output ends directly after the call.

    Markers in code are text. A tool call at the beginning of a code block is a tool call if it names a tool of the
    request.

    Args:
        tool_call_format: parser of the model's tool-call format. None if tool calls are not parsed.
        reasoning: markers around the model's reasoning. None if reasoning is not parsed.
        in_reasoning: whether the prompt ends inside an open reasoning block.
        reasoned: whether the prompt ends after a closed reasoning block.
        untagged: whether tool calls in the form of plain JSON are accepted, until the model uses its tool-call format.
        structured: whether a grammar decides the text. Tool calls are then only accepted instead of text, and all
            markers in text are text.
        may_reason: whether structured output may begin with reasoning that the prompt did not begin.
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
        structured: bool = False,
        may_reason: bool = True,
        tools: Tools | None = None,
        new_id: Callable[[], str] = OPENAI_IDS.random,
    ) -> None:
        self._format = tool_call_format
        self._reasoning = reasoning
        marks = {reasoning.open, reasoning.close} if reasoning else set[str]()
        self.markers: frozenset[str] = (tool_call_format.markers if tool_call_format else frozenset()) | marks
        openers, leading = (tool_call_format.openers, tool_call_format.leading) if tool_call_format else ((), ())
        closers = tool_call_format.closers if tool_call_format else ()
        self._resumes = Markers([*openers, *closers])
        self._closers = Markers(closers)
        self._tagged = frozenset(openers)
        self._drafts = Markers(openers)
        self._draft_ends = Markers([*openers, *([reasoning.close] if reasoning else [])])
        self._untagged = frozenset((*LINES, *LEADING) if untagged else ())
        self._tagged_calls = False
        if untagged:
            openers, leading = (*openers, *LINES), (*leading, *LEADING)
        self._framed = isinstance(tool_call_format, Harmony)
        self._structured = structured
        self._call_openers = Markers(openers)
        self._openers = self._call_openers if reasoned or structured else Markers([*openers, *marks])
        self._text_openers = NO_MARKERS if structured and not self._framed else self._openers
        self._after_reasoning = Markers([*openers, *leading, *(() if structured else marks)])
        first_marks = marks if reasoning is None or not structured else {reasoning.open} if may_reason else ()
        self._first_openers = Markers([*openers, *leading, *first_marks])
        self._source = Source()
        self._output = Output(tools, new_id, structured=structured)
        self._draft_calls: list[OutputEvent] = []  # calls at the end of the reasoning
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

    @property
    def repairs(self) -> frozenset[str]:
        """Names of the mistakes in tool calls that the parser has repaired."""
        return frozenset(self._output.repairs)

    def push(self, text: str) -> list[OutputEvent]:
        """Parse the next chunk of the output and return the new events.

        The parser holds back text that may be the beginning of a marker.
        """
        if self._in_plain_text and self._source.empty and self._text_openers.cannot_begin_in(text):
            self._output.code.feed(text)
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
        opener = ""
        if in_reasoning and self._reasoning is not None:
            opener = yield from self._read_reasoning(self._reasoning)
        else:
            opener = yield from self._skip_space(self._first_openers)
        while True:
            if not opener:
                self._in_plain_text = True
                opener = yield from self._source.until(self._text_openers, self._emit_text)
                self._in_plain_text = False
            if not opener:
                break
            opener = yield from self._parse_block(opener)
        if not output.begun and not self._source.cut:
            output.add_calls(self._draft_calls)

    def _parse_block(self, opener: str) -> Reading[str]:
        """Parse a block of reasoning or tool calls that begins with the marker `opener`.

        Return the opening marker of the next block if it directly follows this block. Otherwise, return "".
        """
        source, output = self._source, self._output
        is_mark = self._reasoning is not None and opener in (self._reasoning.open, self._reasoning.close)
        if opener.startswith("\n"):  # the line break before an untagged call is text
            self._emit_text(source.take(source.at + 1))
            opener = opener[1:]
        if output.code.in_block and not (output.code.begins_block and not is_mark):
            self._emit_text(source.take(source.at + len(opener)))
            return ""
        if self._reasoning is not None and is_mark:
            return (yield from self._parse_mark(self._reasoning, opener))
        if opener in self._closers.strings and not self._framed:
            text = source.take(source.at + len(opener))
            source.settle()
            if output.code.in_span:
                output.text(text)
            else:
                output.repairs.add("tag")
            return ""
        output.named, output.known_only = False, output.code.in_block
        calls = output.calls
        try:
            if opener not in self._untagged:
                yield from self._parse_tagged()
            elif self._tagged_calls:
                source.take(source.at + len(opener))
                raise NotACall
            else:
                yield from read_untagged(source, output)
        except NotACall:
            yield from self._end_failed(begun=output.calls > calls, tagged=opener in self._tagged)
            return ""
        finally:
            output.known_only = False
        if source.unsettled.strip():
            self._emit_text(source.give_back())
            return ""
        return (yield from self._skip_space(self._openers))

    def _end_failed(self, *, begun: bool, tagged: bool) -> Reading[None]:
        """Handle text that is not a tool call, or a tool call that cannot be continued.

        Args:
            begun: whether a call of the block was added to the output.
            tagged: whether the block begins with a marker that only tool calls have.
        """
        source = self._source
        if begun and self._output.open_call:  # the rest of the call is neither text nor valid arguments
            source.give_back()
            yield from source.until(self._resumes, lambda _: None)
            yield from source.marker(self._closers)
            source.give_back()
        elif source.ended and (source.cut or self._output.calls) and (tagged or self._output.named):
            source.take(len(source.text))
            source.give_back()  # the output ended before the arguments of the call
            self._output.repairs.add("unfinished_call")
        else:
            self._emit_text(source.give_back())

    def _parse_tagged(self) -> Reading[None]:
        assert self._format is not None
        calls = self._output.calls
        try:
            yield from self._format.read(self._source, self._output)
        finally:
            if self._output.calls > calls and not self._tagged_calls:
                self._tagged_calls = True
                if not self._framed and not self._structured:  # a closing marker after text between call and marker
                    self._openers = Markers([*self._openers.strings, *self._closers.strings])
                    self._text_openers = self._openers

    def _parse_mark(self, marks: ReasoningMarks, mark: str) -> Reading[str]:
        source, output = self._source, self._output
        in_code = output.code.in_span or output.code.in_block
        if (mark == marks.open and output.begun) or in_code:
            self._close_reasoning(not in_code)
            source.take(source.at + len(mark))
            self._emit_text(source.give_back())
            return ""
        if mark == marks.open:
            source.take(source.at + len(mark))
            return (yield from self._read_reasoning(marks))
        self._close_reasoning()
        output.was_reasoning()
        yield from marks.read_end(source)
        return (yield from self._skip_space(self._after_reasoning))

    def _read_reasoning(self, marks: ReasoningMarks) -> Reading[str]:
        """Parse reasoning after its opening marker. Return the marker that directly follows the reasoning, or ""."""
        self._close_reasoning()
        yield from marks.read_inside(
            self._source, self._output, drafts=self._drafts, read_draft=self._read_draft, exact=self._structured
        )
        return (yield from self._skip_space(self._after_reasoning))

    def _close_reasoning(self, closes: bool = True) -> None:
        """Accept no more reasoning in the text."""
        if closes:
            marks = () if self._reasoning is None else (self._reasoning.open, self._reasoning.close)
            self._openers = Markers(opener for opener in self._openers.strings if opener not in marks)
            self._text_openers = NO_MARKERS if self._structured and not self._framed else self._openers

    def _read_draft(self) -> Reading[str | None]:
        """Parse tool calls inside reasoning. Return their text, which is reasoning, or None if they are tool calls."""
        assert self._format is not None and self._reasoning is not None
        source, output = self._source, self._output
        record = source.record()
        output.begin_trial()
        output.known_only = True
        accepted, follows = False, ""
        try:
            while follows != self._reasoning.close:
                yield from self._format.read(source, output)
                yield from source.space()
                if not (follows := (yield from source.upcoming(self._draft_ends))):
                    break
            accepted = not output.open_call and (bool(follows) or source.complete)
        except NotACall:
            pass
        source.stop_record()
        source.give_back()
        output.known_only = False
        calls = output.end_trial(accepted=accepted and not follows)
        if accepted and follows:
            self._draft_calls = calls
        return None if accepted and not follows else "".join(record)

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
