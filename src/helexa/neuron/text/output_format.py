"""Detect the reasoning format and the tool-call format of a model's output."""

from collections.abc import Sequence

from helexa.neuron.parsers.call_ids import MISTRAL_IDS, OPENAI_IDS
from helexa.neuron.parsers.formats.choice import find_tool_call_format
from helexa.neuron.parsers.formats.harmony import Harmony
from helexa.neuron.parsers.formats.hermes import Hermes
from helexa.neuron.parsers.formats.mistral import Mistral
from helexa.neuron.parsers.formats.tool_call_format import ToolCallFormat
from helexa.neuron.parsers.output import Tools
from helexa.neuron.parsers.parser import OutputParser
from helexa.neuron.parsers.reasoning import ReasoningMarks, find_reasoning_marks
from helexa.neuron.text.tokenizers.detokenizer import Detokenizer
from helexa.neuron.text.tokenizers.tokenizer import Tokenizer

_TURN = 4096  # number of last prompt tokens that are searched for the beginning of the last turn
_TAIL = 16  # number of last prompt tokens that are searched for a reasoning marker if no turn begins in `_TURN` tokens
_END, _FINAL = "<|end|><|start|>assistant", "<|channel|>final<|message|>"


class OutputFormat:
    """The reasoning format and tool-call format of a model's output, detected from its vocabulary and chat template.

    Attributes:
        tool_call_format: tool-call format. None if none was detected. The node's configuration may set another format.
        reasoning: markers before and after reasoning, such as `<think>` and `</think>`. None if the model has no such
            markers, for example with the Harmony format.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        def is_token(text: str) -> bool:
            return tokenizer.token_id(text) is not None

        self.tool_call_format: ToolCallFormat | None = find_tool_call_format(is_token, template)
        self.reasoning = find_reasoning_marks(is_token, template)
        self._tokenizer = tokenizer

    @property
    def separates_reasoning(self) -> bool:
        """Whether the model's output marks reasoning. If so, a parser can separate reasoning from the final answer."""
        return self.frames_calls or self.reasoning is not None

    @property
    def frames_calls(self) -> bool:
        """Whether the model writes all output as messages with headers, as in the Harmony format.

        A grammar for such a format must also include the message headers.
        """
        return isinstance(self.tool_call_format, Harmony)

    @property
    def has_untagged_calls(self) -> bool:
        """Whether the model's tool-call format also has calls in plain JSON, without tags."""
        return isinstance(self.tool_call_format, Hermes) and self.tool_call_format.untagged

    @property
    def thought_marks(self) -> ReasoningMarks:
        """The markers that are added around reasoning if the response returns the reasoning as part of its text."""
        return self.reasoning or ReasoningMarks("<think>", "</think>")

    def end_of_reasoning(self, *, framed: bool = False) -> list[int]:
        """Return the tokens that the server inserts to end the model's reasoning and begin the final answer.

        Args:
            framed: whether to omit the header of the message with the final answer, because a grammar makes the model
                generate the header. Only the Harmony format has headers.
        """
        if not self.frames_calls:
            return self._tokenizer.encode(f"\n{self.thought_marks.close}\n\n", continues=True)
        return self._tokenizer.encode(_END + ("" if framed else _FINAL), continues=True)

    def is_inside(self, prompt: Sequence[int]) -> bool:
        """Return whether `prompt` ends inside a reasoning block. If so, the model continues the reasoning."""
        return self.reasoning is not None and self.reasoning.opened_by(self._turn(prompt))

    def is_over(self, prompt: Sequence[int]) -> bool:
        """Return whether the assistant message at the end of `prompt` already contains a closed reasoning block.

        In this case, the model generates no further reasoning.
        """
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
        """Return a parser for the output that the model generates after `prompt`.

        Return None if the output is only text.

        Args:
            prompt: token ids of the prompt.
            tools: the tools of the request. Without tools, tool calls are not parsed, except in the Harmony format.
            untagged: whether the parser also accepts tool calls without the format's tags. Only some formats support
                this option.
            structured: whether a grammar decides the text after the reasoning, so that markers in the text are text.
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
        """Return the text of the unfinished assistant message at the end of `prompt`.

        The message begins after the last added token, such as `<|im_start|>`. Reasoning markers do not count as added
        tokens here. If the last `_TURN` tokens of the prompt have no added token, the start of the message is unknown.
        The method then returns only the reasoning marker at the end of the prompt, or "" if no marker is there.
        """
        marks = ("", "") if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        for index in range(len(prompt) - 1, max(-1, len(prompt) - 1 - _TURN), -1):
            marker = self._tokenizer.added_text(prompt[index])
            if marker.strip() and marker not in marks:
                return self._tokenizer.decode(prompt[index + 1 :], skip_special=False)
        end = self._tokenizer.decode(prompt[-_TAIL:], skip_special=False).rstrip()
        return next((mark for mark in marks if end.endswith(mark)), "")

    def detokenizer(self, parser: OutputParser | None) -> Detokenizer:
        """Return a detokenizer. Its text includes the control tokens that `parser` needs to recognize."""
        markers = parser.markers if parser else frozenset[str]()
        ids = {self._tokenizer.token_id(marker): marker.encode() for marker in markers}
        return Detokenizer(self._tokenizer, {token_id: text for token_id, text in ids.items() if token_id is not None})
