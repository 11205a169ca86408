"""Parse reasoning that is enclosed in a pair of markers."""

from collections.abc import Callable
from dataclasses import dataclass

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

    def read_inside(
        self,
        source: Source,
        output: Output,
        *,
        drafts: Markers,
        read_draft: Callable[[], Reading[str | None]],
        exact: bool = False,
    ) -> Reading[None]:
        """Parse the content of a reasoning block, after its opening marker. The closing marker may be missing.

        White space at both ends of the reasoning and after the block is dropped.

        Args:
            source: the model's unread text.
            output: receives the reasoning.
            drafts: markers at the beginning of tool calls.
            read_draft: method that parses tool calls inside the reasoning. It returns their text, or None if the calls
                end the output.
            exact: whether only up to two line breaks belong to the closing marker.
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

        ends = Markers([self.close, *drafts.strings])
        while (marker := (yield from source.until(ends, pass_on))) not in ("", self.close):
            if (text := (yield from read_draft())) is None:
                break
            if not text:  # the marker does not begin a call
                text = source.take(source.at + len(marker))
            pass_on(text)
        output.reasoning = False
        if marker == self.close:
            yield from self.read_end(source, exact=exact)

    def read_end(self, source: Source, *, exact: bool = False) -> Reading[None]:
        """Read the closing marker and the white space after it.

        Args:
            source: the model's unread text.
            exact: whether to read only up to two line breaks, because other white space is part of the answer.
        """
        source.take(source.at + len(self.close))
        if exact:
            for _ in range(2):
                yield from source.marker(_LINE)
        else:
            yield from source.space()
        source.settle()


_LINE = Markers(["\n"])
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
