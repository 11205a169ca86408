"""Convert the token ids that the engine generates for one answer to output events."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from helexa.neuron.engine.ipc.messages import Logprob, TokenOutput
from helexa.neuron.output_events import (
    FinishReason,
    OutputEvent,
    PromptScores,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    WasReasoning,
)
from helexa.neuron.parsers.output import Tools
from helexa.neuron.requests.logprobs_of_text import TokenLogprobs
from helexa.neuron.text.model_text import ModelText
from helexa.neuron.text.stop_strings import StopStrings

CallEvent = ToolCallStart | ToolCallDelta


@dataclass(frozen=True)
class AnswerForm:
    """Rules for tool calls and reasoning in the answer to a chat request."""

    # the tools that the answer may call: JSON Schema of each callable tool's arguments, by tool name
    tools: Tools = field(default_factory=dict[str, dict[str, object]])
    # Whether the answer may have several tool calls. If False, the answer ends before a second call.
    parallel: bool = True
    # Whether the answer must consist of tool calls only. If so, the answer ends before a call that repeats an earlier
    # call of the same answer.
    must_call: bool = False
    # whether reasoning is reported as text between the model's reasoning markers (`<think>`), instead of as reasoning
    # events
    spelled_thoughts: bool = False
    # number of reasoning tokens after which the server closes the reasoning; None for no limit
    thinking_budget: int | None = None
    # Whether JSON without the tags of a tool call may be a tool call, if the model's tool-call format allows this.
    # False if the answer has a required structure, because the JSON then is the answer itself.
    untagged_calls: bool = True
    # Whether a grammar determines the text of the answer. In this text, the markers of reasoning and of tool calls have
    # no special meaning.
    structured: bool = False
    # whether a structured answer may begin with reasoning even if the prompt does not end in a reasoning block
    may_reason: bool = True

    @property
    def runs_on(self) -> bool:
        """Whether these rules never end the answer earlier than the engine ends it."""
        return self.parallel and not self.must_call and self.thinking_budget is None


class AnswerReader:
    """Converts the tokens that the engine generates for one answer to output events.

    The reader detokenizes the tokens, parses reasoning and tool calls, and searches stop strings. Stop strings end the
    answer only in its text, not in reasoning or tool calls.

    Args:
        stop_ids: token ids that end the answer and produce no text.
        form: rules for tool calls and reasoning; None if the whole output is plain text.
        closing_limit: if the answer has this number of tokens or more, the server does not close reasoning that exceeds
            its budget, because the output limit leaves no space for text after the reasoning.
        scored: whether to also report the log-probabilities of the prompt's tokens. If so, every token of the answer is
            reported, including the token that ends the answer.
    """

    def __init__(
        self,
        text: ModelText,
        prompt: Sequence[int],
        *,
        stops: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        form: AnswerForm | None = None,
        closing_limit: int = 0,
        logprobs: bool = False,
        scored: bool = False,
    ) -> None:
        self.tokens = 0  # number of tokens of the answer so far, including the token that ends it
        self.reasoning_tokens = 0  # number of reasoning tokens so far, including the reasoning markers
        # Whether a stop string, or a tool call that `form` forbids, has ended the answer. The caller must discard
        # further output of the engine.
        self.stopped = False
        # Whether the reasoning has exceeded its budget. The caller must then call `end_reasoning`. If the model begins
        # to reason again after that call, the value becomes True again.
        self.over_budget = False
        self.written: list[int] = []  # the tokens of the answer so far, if the reasoning has a budget
        self._budget = None if form is None else form.thinking_budget
        self._closing_limit = closing_limit
        self._stop_ids = stop_ids
        self._stops = StopStrings(stops)
        control_ids = {text.tokenizer.control_id(stop): stop for stop in stops}
        self._stop_tokens = {token: stop for token, stop in control_ids.items() if token is not None}
        self._parallel = form is None or form.parallel
        self._parser = (
            None
            if form is None
            else text.output_format.parser(
                prompt,
                form.tools,
                untagged=form.untagged_calls,
                structured=form.structured,
                may_reason=form.may_reason,
            )
        )
        self._detokenizer = text.output_format.detokenizer(self._parser)
        self._marks = text.output_format.thought_marks if form is not None and form.spelled_thoughts else None
        self._logprobs = TokenLogprobs(text.tokenizer, complete=scored) if logprobs else None
        self._reports_all = self._scores_missing = scored
        self._unscored = prompt if scored else ()
        self._prompt_logprobs: list[Logprob] = [(0.0, [])]  # placeholder: the first token has no log-probability
        self._in_spelled_thoughts = False
        self._calls = 0
        self._repeated_calls = RepeatedCalls() if form is not None and form.must_call else None
        self._events: list[OutputEvent] = []

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._stops.matched

    @property
    def repairs(self) -> frozenset[str]:
        """Names of the mistakes in the answer's tool calls that were repaired."""
        return frozenset() if self._parser is None else self._parser.repairs

    def reason(self, output: TokenOutput) -> FinishReason:
        """Return the finish reason, given the last `output` that was passed to `read`."""
        if output.finish == "length" and not self.stopped:
            return "length"
        if self.stop_string is not None or self._calls == 0 or self._parser is None:
            return "stop"
        if self._parser.broken:
            return "stop"  # not `tool_calls`, because the client cannot execute an incomplete call
        return "tool_calls" if self.stopped or not self._parser.call_is_open else "stop"

    def read(self, output: TokenOutput) -> list[OutputEvent]:
        """Process the next tokens from the engine and return the new output events.

        Tokens after the one that sets `stopped` or `over_budget` are dropped.
        """
        tokens = output.tokens
        self.tokens += len(tokens)
        if self._scores_missing:
            self._score(output)
        ending: int | None = None
        if output.finish == "stop" and tokens and tokens[-1] in self._stop_ids:
            *tokens, ending = tokens
        if self._logprobs is not None and len(output.logprobs) < len(tokens):
            raise ValueError(f"the engine returned {len(output.logprobs)} log-probabilities for {len(tokens)} tokens")
        for index, token in enumerate(tokens):
            if self._logprobs is not None:
                self._logprobs.add(token, output.logprobs[index], last=token in self._stop_tokens)
            self._read(token)
            if self.stopped or self.over_budget:
                self.tokens -= len(output.tokens) - index - 1
                if token in self._stop_tokens:
                    self._report_rest()
                return self._shown()
        if output.finish is not None:
            self._end(truncated=output.finish == "length")
            if ending is not None and self._reports_all and self._logprobs is not None:
                self._logprobs.add(ending, output.logprobs[-1], last=True)
            self._report_rest()
        return self._shown()

    def _report_rest(self) -> None:
        """Report log-probabilities of the last tokens without text, if requested."""
        if self._reports_all and self._logprobs is not None and (remaining := self._logprobs.take_all()):
            self._show(TextDelta("", remaining))

    def _score(self, output: TokenOutput) -> None:
        """Collect the prompt's log-probabilities; report them when complete."""
        assert self._logprobs is not None
        self._prompt_logprobs += output.prompt_logprobs
        if len(self._prompt_logprobs) == len(self._unscored):
            scores = map(self._logprobs.with_text, self._unscored, self._prompt_logprobs)
            self._show(PromptScores(tuple(scores)))
            self._scores_missing = False
        elif output.tokens:
            raise ValueError(
                f"the engine returned {len(self._prompt_logprobs)} log-probabilities for {len(self._unscored)} tokens "
                "of the prompt"
            )

    def end_reasoning(self, tokens: Sequence[int]) -> list[OutputEvent]:
        """Append `tokens`, which close the reasoning; return the new events."""
        self.tokens += len(tokens)
        for token in tokens:
            self._read(token)
        return self._shown()

    def _shown(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events if len(events) < 2 else _merged(events)

    def _read(self, token: int) -> None:
        if token in self._stop_tokens and not self._is_outside_text:
            # A stop string that is a control token is found by its token id, because the token has no text.
            self._end(truncated=False)
            if not self.stopped:
                self.stopped, self._stops.matched = True, self._stop_tokens[token]
            return
        text = self._detokenizer.push((token,))
        if self._parser is None:
            self._add_text(text)
            return
        was_reasoning = self._parser.in_reasoning
        self._parse(self._parser.push(text))
        if was_reasoning or self._parser.in_reasoning:
            self.reasoning_tokens += 1
            if self._logprobs is not None:
                self._logprobs.clear()
        if self._budget is not None:
            self.written.append(token)
            # Some models begin a tool call without closing their reasoning. In the middle of this call, the server must
            # not insert the closing marker of the reasoning.
            may_close = self._parser.in_reasoning and not self._parser.may_leave_reasoning
            beyond = may_close and self.reasoning_tokens >= self._budget
            self.over_budget = beyond and len(self.written) < self._closing_limit

    @property
    def _is_outside_text(self) -> bool:
        """Whether the output is in reasoning or a tool call, where no stop applies."""
        return self._parser is not None and (self._parser.in_reasoning or self._parser.call_is_open)

    def _end(self, *, truncated: bool) -> None:
        remaining_text = self._detokenizer.flush()
        if self._parser is None:
            self._add_text(remaining_text)
        else:
            self._parse(self._parser.push(remaining_text))
            self._parse(self._parser.flush(cut=truncated))
            if self._repeated_calls is not None and not self.stopped:
                self._show_all(self._repeated_calls.release())
        if not self.stopped:
            self._release_held_text()
            self._close_thoughts()

    def _parse(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            if not isinstance(event, ToolCallDelta):
                self._end_call()
            if self.stopped:
                return
            match event:
                case TextDelta(text):
                    self._add_text(text)
                case WasReasoning() if self._marks is not None:
                    pass  # nothing to report, because the client receives reasoning as text
                case ToolCallStart() if self._calls > 0 and not self._parallel:
                    self._release_held_text()
                    self.stopped = True
                case _:
                    self._release_held_text()
                    self._calls += isinstance(event, ToolCallStart)
                    if self._logprobs is not None:
                        self._logprobs.clear()
                    if self._repeated_calls is not None and isinstance(event, ToolCallStart | ToolCallDelta):
                        self._show_all(self._repeated_calls.push(event))
                    else:
                        self._show(event)
        if self._parser is not None and not self._parser.call_is_open:
            self._end_call()

    def _end_call(self) -> None:
        """End the answer if the last tool call repeats an earlier call."""
        if self._repeated_calls is not None and not self.stopped:
            self._show_all(self._repeated_calls.end())
            self.stopped = self._repeated_calls.repeated

    def _add_text(self, text: str) -> None:
        text, self.stopped = self._stops.push(text)
        if text:
            self._show_text(text)

    def _release_held_text(self) -> None:
        """Report the text that was withheld because a stop string might begin with it."""
        if held_text := self._stops.flush():
            self._show_text(held_text)

    def _show_text(self, text: str) -> None:
        self._show(TextDelta(text) if self._logprobs is None else TextDelta(text, self._logprobs.take(text)))

    def _show_all(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            self._show(event)

    def _show(self, event: OutputEvent) -> None:
        if self._marks is not None:
            if isinstance(event, ReasoningDelta):
                event = TextDelta(event.text if self._in_spelled_thoughts else f"{self._marks.open}\n{event.text}")
                self._in_spelled_thoughts = True
            else:
                self._close_thoughts()
        self._events.append(event)

    def _close_thoughts(self) -> None:
        if self._in_spelled_thoughts and self._marks is not None:
            self._events.append(TextDelta(f"\n{self._marks.close}\n\n"))
            self._in_spelled_thoughts = False


def _kind(event: OutputEvent) -> tuple[object, int]:
    return type(event), event.index if isinstance(event, ToolCallDelta | ToolCallStart) else 0


def _merged(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """Return `events` with consecutive chunks of the same kind merged into one event."""
    merged: list[OutputEvent] = []
    for _, same_kind in groupby(events, _kind):
        first, *following = same_kind
        match first:
            case TextDelta() if following:
                deltas = [event for event in (first, *following) if isinstance(event, TextDelta)]
                logprobs = tuple(logprob for delta in deltas for logprob in delta.logprobs)
                merged.append(TextDelta("".join([delta.text for delta in deltas]), logprobs))
            case ReasoningDelta() if following:
                thoughts = [event.text for event in (first, *following) if isinstance(event, ReasoningDelta)]
                merged.append(ReasoningDelta("".join(thoughts)))
            case ToolCallDelta() if following:
                pieces = [event.arguments for event in (first, *following) if isinstance(event, ToolCallDelta)]
                merged.append(ToolCallDelta(first.index, "".join(pieces)))
            case _:
                merged.append(first)
    return merged


class RepeatedCalls:
    """Removes tool calls that repeat an earlier call of the same answer.

    A call is a repetition if its tool name and the text of its arguments equal those of an earlier call. The events of
    a call are withheld as long as the call may turn out to be a repetition.
    """

    # If a request forces tool calls, the grammar allows only another call or the end of the answer. A small model may
    # then repeat one call until the output limit.
    def __init__(self) -> None:
        # Whether the last completed call is a repetition. The events of a repetition are never returned.
        self.repeated = False
        self._earlier: set[tuple[str, str]] = set()
        self._name = ""
        self._arguments: list[str] = []
        self._length = 0  # length of the arguments so far
        # arguments of the earlier calls that the current call may repeat: same tool, same beginning of the arguments
        self._candidates: list[str] = []
        self._withheld: list[CallEvent] = []

    def push(self, event: CallEvent) -> Sequence[CallEvent]:
        """Add an event of a tool call; return the events to report now."""
        if isinstance(event, ToolCallStart):
            self._name, self._arguments, self._length = event.name, [], 0
            self._candidates = [arguments for name, arguments in self._earlier if name == event.name]
        else:
            self._candidates = [text for text in self._candidates if text.startswith(event.arguments, self._length)]
            self._arguments.append(event.arguments)
            self._length += len(event.arguments)
        self._withheld.append(event)
        return [] if self._candidates else self.release()

    def end(self) -> Sequence[CallEvent]:
        """Complete the current call; return its events unless it is a repetition."""
        if not self._name:
            return []
        call = (self._name, "".join(self._arguments))
        self._name = ""
        self.repeated = call in self._earlier
        self._earlier.add(call)
        return [] if self.repeated else self.release()

    def release(self) -> Sequence[CallEvent]:
        """Return the withheld events of the current call and remove them from this object."""
        events, self._withheld = self._withheld, []
        return events
