"""Reasoning format and tool-call format of a model."""

from collections.abc import Sequence

from helexa.neuron.parsers.formats.choice import find_family
from helexa.neuron.parsers.formats.family import Family
from helexa.neuron.parsers.formats.harmony import Harmony
from helexa.neuron.parsers.formats.hermes import Hermes
from helexa.neuron.parsers.output import Tools
from helexa.neuron.parsers.parser import OutputParser
from helexa.neuron.parsers.reasoning import ReasoningMarks, find_reasoning_marks
from helexa.neuron.text.tokenizers.detokenizer import Detokenizer
from helexa.neuron.text.tokenizers.tokenizer import Tokenizer

_TURN = 4096  # number of last prompt tokens that are searched for the beginning of the last turn
_TAIL = 16  # number of last prompt tokens that are searched for a reasoning marker otherwise
_END, _FINAL = "<|end|><|start|>assistant", "<|channel|>final<|message|>"


class OutputFormat:
    """The reasoning format and tool-call format of a model's output, detected from its vocabulary and chat template.

    Attributes:
        family: tool-call format; None if no format was detected. The node's configuration may set another format.
        reasoning: markers around the reasoning; None if the model has no markers, for example with the Harmony format.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        def is_token(text: str) -> bool:
            return tokenizer.token_id(text) is not None

        self.family: Family | None = find_family(is_token, template)
        self.reasoning = find_reasoning_marks(is_token, template)
        self._tokenizer = tokenizer

    @property
    def separates_reasoning(self) -> bool:
        """Whether the output format marks reasoning, so that it can be separated from the answer."""
        return self.frames_calls or self.reasoning is not None

    @property
    def frames_calls(self) -> bool:
        """Whether the format encloses all output in messages, as Harmony does; a grammar then includes the headers."""
        return isinstance(self.family, Harmony)

    @property
    def thought_marks(self) -> ReasoningMarks:
        """Markers for reasoning that is returned as part of the text."""
        return self.reasoning or ReasoningMarks("<think>", "</think>")

    def end_of_reasoning(self, *, framed: bool = False) -> list[int]:
        """Return the tokens that the server inserts to end the reasoning and begin the answer.

        Args:
            framed: whether a grammar will produce the header of the answer's message, so that it is not inserted.
        """
        if not self.frames_calls:
            return self._tokenizer.encode(f"\n{self.thought_marks.close}\n\n")
        return self._tokenizer.encode(_END + ("" if framed else _FINAL))

    def is_inside(self, prompt: Sequence[int]) -> bool:
        """Return whether `prompt` ends inside a reasoning block, so that the answer begins with reasoning."""
        return self.reasoning is not None and self.reasoning.opened_by(self._turn(prompt))

    def is_over(self, prompt: Sequence[int]) -> bool:
        """Return whether `prompt` contains a closed reasoning block in the answer's turn, so that reasoning is over."""
        return self.reasoning is not None and self.reasoning.closed_by(self._turn(prompt))

    def parser(self, prompt: Sequence[int], tools: Tools, *, untagged: bool = True) -> OutputParser | None:
        """Return an output parser for an answer to `prompt`; None if the output is only text.

        Args:
            tools: the offered tools; without tools, calls are not parsed, except in the Harmony format.
            untagged: whether calls without the format's tags are parsed, if the format supports them.
        """
        family = self.family if tools or self.frames_calls else None
        if family is None and self.reasoning is None:
            return None
        inside, reasoned = self.is_inside(prompt), self.is_over(prompt)
        return OutputParser(
            family,
            reasoning=self.reasoning,
            in_reasoning=inside,
            reasoned=reasoned,
            untagged=untagged and isinstance(family, Hermes) and family.untagged,
            tools=tools,
        )

    def _turn(self, prompt: Sequence[int]) -> str:
        """Return the text at the end of a prompt that belongs to the answer's turn: all text after the last marker.

        A marker is an added token, such as `<|im_start|>`, except for reasoning markers. In a prompt without markers,
        the beginning of the turn is unknown; return the reasoning marker at the end of the prompt, or "".
        """
        marks = ("", "") if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        for index in range(len(prompt) - 1, max(-1, len(prompt) - 1 - _TURN), -1):
            marker = self._tokenizer.added_text(prompt[index])
            if marker.strip() and marker not in marks:
                return self._tokenizer.decode(prompt[index + 1 :], skip_special=False)
        end = self._tokenizer.decode(prompt[-_TAIL:], skip_special=False).rstrip()
        return next((mark for mark in marks if end.endswith(mark)), "")

    def detokenizer(self, parser: OutputParser | None) -> Detokenizer:
        """Return a detokenizer that includes the control tokens that `parser` needs in the text."""
        markers = parser.markers if parser else frozenset[str]()
        ids = {self._tokenizer.token_id(marker): marker.encode() for marker in markers}
        return Detokenizer(self._tokenizer, {token_id: text for token_id, text in ids.items() if token_id is not None})
