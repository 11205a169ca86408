"""Parse a model's output during generation into reasoning, tool calls and text."""

from collections.abc import Callable

from helexa.neuron.output_events import OutputEvent, TextDelta
from helexa.neuron.parsers.call_ids import OPENAI_IDS
from helexa.neuron.parsers.formats.harmony_and_muse_glimmer import MessageFormat
from helexa.neuron.parsers.formats.llama_json_and_mistral import LEADING, LINES, read_untagged
from helexa.neuron.parsers.formats.tool_call_format import ToolCallFormat
from helexa.neuron.parsers.output import Output, Tools
from helexa.neuron.parsers.reasoning import ReasoningMarks
from helexa.neuron.parsers.source import NO_MARKERS, Markers, NotACall, Reading, Source


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
        tools, new_id: see `Output`.
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
        # Special tokens that the parser needs. The detokenizer must include them in the text.
        self.markers: frozenset[str] = (tool_call_format.markers if tool_call_format else frozenset()) | marks
        openers, leading = (tool_call_format.openers, tool_call_format.leading) if tool_call_format else ((), ())
        closers = tool_call_format.closers if tool_call_format else ()
        self._resumes = Markers([*openers, *closers])  # where parsing continues after a call that cannot be parsed
        self._closers = Markers(closers)
        self._tagged = frozenset(openers)
        self._drafts = Markers(openers)  # the markers that may begin a call inside reasoning
        self._draft_ends = Markers([*openers, *([reasoning.close] if reasoning else [])])
        self._untagged = frozenset((*LINES, *LEADING) if untagged else ())
        self._tagged_calls = False  # whether the output has a call in the model's tool-call format
        # A call in plain JSON must begin a line, because a brace within a line is ordinary text.
        if untagged:
            openers, leading = (*openers, *LINES), (*leading, *LEADING)
        # The markers of messages enclose all output, also text. They are therefore never dropped as stray tags.
        self._framed = isinstance(tool_call_format, MessageFormat)
        self._structured = structured
        self._call_openers = Markers(openers)
        self._openers = self._call_openers if reasoned or structured else Markers([*openers, *marks])
        # In structured text, a marker may be a part of a JSON string.
        self._text_openers = NO_MARKERS if structured and not self._framed else self._openers
        self._after_reasoning = Markers([*openers, *leading, *(() if structured else marks)])
        # Structured output cannot begin with a closing marker, which would turn the answer into reasoning.
        first_marks = marks if reasoning is None or not structured else {reasoning.open} if may_reason else ()
        answer = () if reasoning is None or structured else reasoning.answer[:1]
        self._answer_opener = "".join(answer)
        self._answer_closers: tuple[str, ...] = ()  # while the output is inside the markers around the answer
        self._after_reasoning = Markers([*self._after_reasoning.strings, *answer])
        self._first_openers = Markers([*openers, *leading, *first_marks, *answer])
        self._source = Source()
        self._output = Output(tools, new_id, structured=structured)
        self._draft_calls: list[OutputEvent] = []  # calls at the end of the reasoning
        self._in_plain_text = False  # the next text is plain text unless a marker begins in it
        self._reading = self._read(in_reasoning and reasoning is not None)
        next(self._reading)  # run to the first read of text

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning, unless a marker ends the reasoning.

        A generated token counts as a reasoning token if this value is true before or after its text is pushed.
        """
        return self._output.reasoning

    @property
    def may_leave_reasoning(self) -> bool:
        """Whether a marker or a call that may end the reasoning has begun."""
        return self._output.on_trial or not self._source.empty

    @property
    def call_is_open(self) -> bool:
        """Whether the last tool call's arguments are incomplete or could not be repaired."""
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
        """Parse the next chunk of the output and return the new events."""
        # Most tokens are plain text that cannot begin a marker. They skip the coroutine, to save time.
        if self._in_plain_text and self._source.empty and self._text_openers.cannot_begin_in(text):
            self._output.code.feed(text)
            return [TextDelta(text)] if text else []
        self._source.feed(text)
        next(self._reading, None)
        return self._output.drain()

    def flush(self, *, cut: bool = False) -> list[OutputEvent]:
        """End the output and return the remaining events.

        If a limit `cut` the output, a tool call without an end marker is incomplete.
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
        # The model wrote only reasoning. Calls at its end are then the answer, unless a limit cut the output.
        if not output.begun and not self._source.cut:
            output.add_calls(self._draft_calls)

    def _parse_block(self, opener: str) -> Reading[str]:
        """Parse the block that the marker `opener` begins.

        Return the opening marker that directly follows the block, or "".
        """
        source, output = self._source, self._output
        is_mark = self._reasoning is not None and opener in (self._reasoning.open, self._reasoning.close)
        if opener and opener in (self._answer_opener, *self._answer_closers) and not output.code.in_block:
            return (yield from self._parse_answer_mark(opener))
        if opener.startswith("\n"):  # the line break before an untagged call is text
            self._emit_text(source.take(source.at + 1))
            opener = opener[1:]
        # Models quote calls in code. At the beginning of a code block, they also write real calls.
        if output.code.in_block and not (output.code.begins_block and not is_mark):
            self._emit_text(source.take(source.at + len(opener)))
            return ""
        if self._reasoning is not None and is_mark:
            return (yield from self._parse_mark(self._reasoning, opener))
        # A closing tag without a call is a mistake of the model. Clients should not see it as text.
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
            # The model has used its own format before, so plain JSON is not a call.
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
        # The block has text after the call that does not belong to the call.
        if source.unsettled.strip():
            self._emit_text(source.give_back())
            return ""
        return (yield from self._skip_space(self._openers))

    def _end_failed(self, *, begun: bool, tagged: bool) -> Reading[None]:
        """Emit text that is not a tool call; drop a tool call that cannot be continued.

        Args:
            begun: whether a call of the block was added to the output.
            tagged: whether only tool calls begin with the marker of the block.
        """
        source = self._source
        if begun and self._output.open_call:  # drop the rest, which is neither text nor valid
            source.give_back()
            yield from source.until(self._resumes, lambda _: None)
            yield from source.marker(self._closers)
            source.give_back()
        elif source.ended and (source.cut or self._output.calls) and (tagged or self._output.named):
            # The output ended before the arguments of the call, so the beginning of the call is dropped.
            source.take(len(source.text))
            source.give_back()
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
                if not self._framed and not self._structured:  # drop a closing marker that comes after later text, too
                    self._openers = Markers([*self._openers.strings, *self._closers.strings])
                    self._text_openers = self._openers

    def _parse_mark(self, marks: ReasoningMarks, mark: str) -> Reading[str]:
        source, output = self._source, self._output
        in_code = output.code.in_span or output.code.in_block
        # Reasoning must come before all text, and markers in code are text.
        if (mark == marks.open and output.begun) or in_code:
            self._close_reasoning(not in_code)
            source.take(source.at + len(mark))
            self._emit_text(source.give_back())
            return ""
        if mark == marks.open:
            source.take(source.at + len(mark))
            return (yield from self._read_reasoning(marks))
        # A closing marker without an opening marker: the text before it becomes reasoning.
        self._close_reasoning()
        output.was_reasoning()
        yield from marks.read_end(source)
        return (yield from self._skip_space(self._after_reasoning))

    def _parse_answer_mark(self, mark: str) -> Reading[str]:
        """Drop a marker before or after the answer, and the white space around it."""
        source = self._source
        source.take(source.at + len(mark))
        source.settle()
        openers = [opener for opener in self._openers.strings if opener not in self._answer_closers]
        if mark == self._answer_opener and self._reasoning is not None:
            close = self._reasoning.answer[1]
            self._answer_closers = (close, f"\n{close}")
            openers += self._answer_closers
        else:
            self._answer_closers = ()
        self._answer_opener = ""
        self._openers = self._text_openers = Markers(openers)
        yield from source.space()
        source.give_back()
        return (yield from source.upcoming(self._openers))

    def _read_reasoning(self, marks: ReasoningMarks) -> Reading[str]:
        """Parse reasoning after its opening marker. Return the marker after it, or ""."""
        self._close_reasoning()
        yield from marks.read_inside(
            self._source, self._output, drafts=self._drafts, read_draft=self._read_draft, exact=self._structured
        )
        return (yield from self._skip_space(self._after_reasoning))

    def _close_reasoning(self, closes: bool = True) -> None:
        """If `closes`, count reasoning markers in the answer's text as text."""
        # A marker in code is a quotation, which does not show that the reasoning is over.
        if closes:
            marks = () if self._reasoning is None else (self._reasoning.open, self._reasoning.close)
            self._openers = Markers(opener for opener in self._openers.strings if opener not in marks)
            self._text_openers = NO_MARKERS if self._structured and not self._framed else self._openers

    def _read_draft(self) -> Reading[str | None]:
        """Parse calls inside reasoning, and return their text.

        Return None if the output ends after the calls, which then are tool calls and not a part of the reasoning.
        """
        assert self._format is not None and self._reasoning is not None
        source, output = self._source, self._output
        record = source.record()
        # A call inside reasoning is a part of the reasoning, unless the output ends after the call. Its events are
        # withheld until this is known.
        output.begin_trial()
        # Only a call of a tool in the request can end the reasoning.
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
        """Read white space, and return the marker after it: one of `openers`, or "".

        White space without a marker after it is text, except at the end of an output with tool calls.
        """
        source = self._source
        if opener := (yield from source.upcoming(openers)):
            return opener
        yield from source.space()
        if not (opener := (yield from source.upcoming(openers))):
            # white space before text belongs to the text
            space = source.give_back()
            if self._output.calls == 0 or (yield from source.peek()):
                self._emit_text(space)
        return opener

    def _emit_text(self, text: str) -> None:
        self._source.settle()
        self._output.text(text)
