"""Detect the reasoning and tool-call formats of a model's output."""

from collections.abc import Sequence

from helexa.neuron.parsers.call_ids import MISTRAL_IDS, OPENAI_IDS
from helexa.neuron.parsers.formats.detection import ToolCallFormat, find_tool_call_format
from helexa.neuron.parsers.formats.harmony import MessageFormat
from helexa.neuron.parsers.formats.hermes import Hermes
from helexa.neuron.parsers.formats.json_calls import Mistral
from helexa.neuron.parsers.output import Tools
from helexa.neuron.parsers.parser import OutputParser
from helexa.neuron.parsers.reasoning import ReasoningMarks, find_reasoning_marks
from helexa.neuron.text.tokenizer import Detokenizer, Tokenizer

_TURN = 4096  # number of last prompt tokens that are searched for the beginning of the last turn
_TAIL = 16  # number of last prompt tokens that are searched for a reasoning marker if no turn begins in `_TURN` tokens


class OutputFormat:
    """The formats of a model's output, according to its vocabulary and chat template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        def is_token(text: str) -> bool:
            return tokenizer.token_id(text) is not None

        # Tool-call format, or None. The node's configuration may set another format.
        self.tool_call_format: ToolCallFormat | None = find_tool_call_format(is_token, template)
        # Markers around reasoning, such as `<think>`, or None. Formats of messages have no such markers.
        self.reasoning = find_reasoning_marks(is_token, template)
        self._tokenizer = tokenizer
        self._inserted: dict[str, tuple[int, ...]] = {}

    @property
    def separates_reasoning(self) -> bool:
        """Whether the output marks reasoning, so that a parser can separate it."""
        return self.frames_calls or self.reasoning is not None

    @property
    def frames_calls(self) -> bool:
        """Whether the model writes all output as messages with headers (`MessageFormat`).

        A grammar for this format must include the headers.
        """
        return isinstance(self.tool_call_format, MessageFormat)

    @property
    def has_untagged_calls(self) -> bool:
        """Whether the tool-call format also has calls in plain JSON, without tags."""
        return isinstance(self.tool_call_format, Hermes) and self.tool_call_format.untagged

    @property
    def thought_marks(self) -> ReasoningMarks:
        """The markers around reasoning that a response returns as part of its text."""
        return self.reasoning or ReasoningMarks("<think>", "</think>")

    def end_of_reasoning(self, *, framed: bool = False) -> list[int]:
        """Return the tokens that the server inserts to end the model's reasoning.

        If `framed`, the header of the final message is omitted, because a grammar makes the model generate it.
        """
        text = f"\n{self.thought_marks.close}\n\n"
        if isinstance(known := self.tool_call_format, MessageFormat):
            text = known.thought_end + ("" if framed else known.final_header)
        if text not in self._inserted:  # every request needs the tokens, and tokenizing may be slow
            self._inserted[text] = tuple(self._tokenizer.encode(text, continues=True))
        return list(self._inserted[text])

    def is_inside(self, prompt: Sequence[int]) -> bool:
        """Return whether `prompt` ends inside reasoning, which the model continues."""
        return self.reasoning is not None and self.reasoning.opened_by(self._turn(prompt))

    def is_over(self, prompt: Sequence[int]) -> bool:
        """Return whether `prompt` ends with a message that has finished reasoning."""
        return self.reasoning is not None and self.reasoning.closed_by(self._turn(prompt))

    def parser(
        self,
        prompt: Sequence[int],
        tools: Tools,
        *,
        untagged: bool = True,
        structured: bool = False,
        may_reason: bool = True,
    ) -> OutputParser | None:
        """Return a parser for the output after `prompt`, None if the output is only text.

        Args:
            prompt: token ids of the prompt.
            tools: the tools of the request. Without tools, only a format of messages is parsed.
            untagged: whether to accept tool calls without the format's tags, if the format has them.
            structured: whether a grammar decides the text after the reasoning, so that markers in it are text.
            may_reason: whether the model may reason if the prompt has not begun the reasoning.
        """
        tool_call_format = self.tool_call_format if tools or self.frames_calls else None
        if tool_call_format is None and self.reasoning is None:
            return None
        inside, reasoned = self.is_inside(prompt), self.is_over(prompt)
        return OutputParser(
            tool_call_format,
            reasoning=self.reasoning,
            in_reasoning=inside,
            reasoned=reasoned,
            untagged=untagged and self.has_untagged_calls,
            structured=structured,
            may_reason=may_reason and not (structured and reasoned),
            tools=tools,
            new_id=(MISTRAL_IDS if isinstance(tool_call_format, Mistral) else OPENAI_IDS).random,
        )

    def _turn(self, prompt: Sequence[int]) -> str:
        """Return the text of the unfinished assistant message at the end of `prompt`."""
        # The message begins after the last added token, such as `<|im_start|>`, that is no reasoning marker.
        marks = ("", "") if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        for index in range(len(prompt) - 1, max(-1, len(prompt) - 1 - _TURN), -1):
            marker = self._tokenizer.added_text(prompt[index])
            if marker.strip() and marker not in marks:
                return self._tokenizer.decode(prompt[index + 1 :], skip_special=False)
        # The start of the message is unknown: only a marker at the end of the prompt is certain.
        end = self._tokenizer.decode(prompt[-_TAIL:], skip_special=False).rstrip()
        return next((mark for mark in marks if end.endswith(mark)), "")

    def detokenizer(self, parser: OutputParser | None) -> Detokenizer:
        """Return a detokenizer that keeps the control tokens that `parser` recognizes."""
        markers = parser.markers if parser else frozenset[str]()
        ids = {self._tokenizer.token_id(marker): marker.encode() for marker in markers}
        return Detokenizer(self._tokenizer, {token_id: text for token_id, text in ids.items() if token_id is not None})
