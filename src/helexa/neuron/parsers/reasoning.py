"""Parse reasoning that is enclosed in a pair of markers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from helexa.neuron.parsers.markers import Markers
from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Reading, Source


@dataclass(frozen=True)
class ReasoningMarks:
    """The markers before and after reasoning, such as `<think>` and `</think>`.

    The detokenizer must include the markers in the text to parse.
    """

    open: str
    close: str

    def opened_by(self, turn: str) -> bool:
        """Return whether `turn` ends inside an open reasoning block.

        Args:
            turn: text of the unfinished assistant message at the end of the prompt.
        """
        return turn.rfind(self.open) > turn.rfind(self.close)

    def closed_by(self, turn: str) -> bool:
        """Return whether `turn` contains a closed reasoning block, and no open block after it.

        Args:
            turn: text of the unfinished assistant message at the end of the prompt.
        """
        return turn.rfind(self.close) > turn.rfind(self.open)

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse a reasoning block that begins with its opening marker."""
        source.take(source.at + len(self.open))
        yield from self.read_inside(source, output)

    def read_inside(self, source: Source, output: Output) -> Reading[None]:
        """Parse the content of a reasoning block, after its opening marker. The closing marker may be missing.

        White space at both ends of the reasoning and after the block is dropped.
        """
        output.reasoning = True
        yield from source.space()
        source.settle()
        space: list[str] = []  # white space that may end the block

        def pass_on(chunk: str) -> None:
            source.settle()
            if content := chunk.rstrip():
                output.thought("".join(space) + content)
                space.clear()
            space.append(chunk[len(content) :])

        ended = yield from source.until(self._end, pass_on)
        output.reasoning = False
        if ended:
            yield from self.read_end(source)

    def read_end(self, source: Source) -> Reading[None]:
        """Read the closing marker and the white space after it."""
        source.take(source.at + len(self.close))
        yield from source.space()
        source.settle()

    @cached_property
    def _end(self) -> Markers:
        return Markers([self.close])


_KNOWN = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<thought>", "</thought>"),
    ReasoningMarks("<reasoning>", "</reasoning>"),
)


def find_reasoning_marks(is_token: Callable[[str], bool], template: str) -> ReasoningMarks | None:
    """Return the reasoning markers of a model, or None if no markers are found.

    Markers in the vocabulary take precedence over markers in the chat template.

    Args:
        is_token: function that returns whether a text is a token of the model's vocabulary.
        template: text of the model's chat template.
    """
    for present in (is_token, template.__contains__):
        for marks in _KNOWN:
            if present(marks.open) and present(marks.close):
                return marks
    return None
