"""How a model writes what is not plain text: its reasoning and its calls of tools."""

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

_TURN = 4096  # tokens of a prompt, from its end, among which its last turn begins
_TAIL = 16  # tokens: where it does not, a prompt's last ones, among which a mark of reasoning is
_END, _FINAL = "<|end|><|start|>assistant", "<|channel|>final<|message|>"


class Notation:
    """What one model's vocabulary and chat template show of it.

    Attributes:
        family: of its calls, None where it knows none; whoever loads the model may say another.
        reasoning: the marks around its reasoning, None where it has none; harmony has its own.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        def is_token(text: str) -> bool:
            return tokenizer.token_id(text) is not None

        self.family: Family | None = find_family(is_token, template)
        self.reasoning = find_reasoning_marks(is_token, template)
        self._tokenizer = tokenizer

    @property
    def reasons(self) -> bool:
        """Whether the model's reasoning can be told from its answer."""
        return self.frames_calls or self.reasoning is not None

    @property
    def frames_calls(self) -> bool:
        """Whether all that it says is in messages, whose frames grammars have too."""
        return isinstance(self.family, Harmony)

    @property
    def thought_marks(self) -> ReasoningMarks:
        """The marks in which reasoning is spelled out for who wants it as text."""
        return self.reasoning or ReasoningMarks("<think>", "</think>")

    def end_of_reasoning(self, *, framed: bool = False) -> list[int]:
        """The tokens that end reasoning and begin the answer, where they come from us.

        Args:
            framed: what follows is held to a grammar, which frames it where that has to be.
        """
        if not self.frames_calls:
            return self._tokenizer.encode(f"\n{self.thought_marks.close}\n\n")
        return self._tokenizer.encode(_END + ("" if framed else _FINAL))

    def is_inside(self, prompt: Sequence[int]) -> bool:
        """Whether an answer to `prompt` begins inside reasoning."""
        return self.reasoning is not None and self.reasoning.opened_by(self._turn(prompt))

    def is_over(self, prompt: Sequence[int]) -> bool:
        """Whether `prompt` has ended the reasoning, or says that there is to be none."""
        return self.reasoning is not None and self.reasoning.closed_by(self._turn(prompt))

    def parser(self, prompt: Sequence[int], tools: Tools, *, untagged: bool = True) -> OutputParser | None:
        """One for an answer to `prompt`, in which calls of `tools` count; None where there is nothing to tell apart.

        Args:
            untagged: calls without the family's tags count, if the family has such calls.
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
        """What a prompt has of the answer already: all behind its last marker but those of reasoning.

        Without a marker it is one of these marks, if the prompt ends with that: who wrote others is not known.
        """
        marks = ("", "") if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        for place in range(len(prompt) - 1, max(-1, len(prompt) - 1 - _TURN), -1):
            marker = self._tokenizer.added_text(prompt[place])
            if marker.strip() and marker not in marks:
                return self._tokenizer.decode(prompt[place + 1 :], skip_special=False)
        end = self._tokenizer.decode(prompt[-_TAIL:], skip_special=False).rstrip()
        return next((mark for mark in marks if end.endswith(mark)), "")

    def detokenizer(self, parser: OutputParser | None) -> Detokenizer:
        """One that lets through what `parser` has to see."""
        markers = parser.markers if parser else frozenset[str]()
        ids = {self._tokenizer.token_id(marker): marker.encode() for marker in markers}
        return Detokenizer(self._tokenizer, {number: spelled for number, spelled in ids.items() if number is not None})
