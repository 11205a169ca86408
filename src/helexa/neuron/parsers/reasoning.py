"""Parse reasoning that is enclosed in a pair of markers."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Markers, Reading, Source


@dataclass(frozen=True)
class ReasoningMarks:
    """The markers before and after reasoning, such as `<think>` and `</think>`."""

    open: str
    close: str
    label: str = ""  # word after the opening marker that is not part of the reasoning; "" for none
    # markers around the answer after the reasoning, which are not part of the answer; empty for none
    answer: tuple[str, ...] = ()

    def opened_by(self, turn: str) -> bool:
        """Return whether the unfinished message `turn` ends inside a reasoning block."""
        return turn.rfind(self.open) > turn.rfind(self.close)

    def closed_by(self, turn: str) -> bool:
        """Return whether the unfinished message `turn` has finished reasoning."""
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
        """Parse reasoning after its opening marker. The closing marker may be missing.

        White space at both ends of the reasoning and after the block is dropped.

        Args:
            source: the model's unread text.
            drafts: markers at the beginning of tool calls.
            read_draft: parses tool calls inside the reasoning. It returns the text that it has read, or None if the
                calls end the output.
            exact: whether also a closing marker in quotation marks ends the reasoning; see also `read_end`.
        """
        output.reasoning = True
        yield from source.space()
        # the word after the opening marker, for example `thought` after `<|channel>`
        if self.label and (yield from source.marker(Markers([self.label]))):
            yield from source.space()
        source.settle()
        space: list[str] = []  # white space that may end the block
        last = ""  # the last two characters

        def pass_on(chunk: str) -> None:
            nonlocal last
            last = (last + chunk)[-2:]
            source.settle()
            # White space at the end of the block is dropped. Only later text shows whether the block ends.
            if content := chunk.rstrip():
                output.thought("".join(space) + content)
                space.clear()
            space.append(chunk[len(content) :])

        ends = Markers([self.close, *drafts.strings])
        while marker := (yield from source.until(ends, pass_on)):
            if marker == self.close:
                if exact or not (yield from self._is_quoted(source, last)):
                    break
                pass_on(source.take(source.at + len(marker)))
                continue
            if (text := (yield from read_draft())) is None:
                break
            if not text:  # the marker does not begin a call
                text = source.take(source.at + len(marker))
            pass_on(text)
        output.reasoning = False
        if marker == self.close:
            yield from self.read_end(source, exact=exact)

    def _is_quoted(self, source: Source, before: str) -> Reading[bool]:
        """Return whether the upcoming closing marker is quoted after the text `before`."""
        # Models quote the marker when they reason about chat templates.
        quote = _OPENING_QUOTE.search(before)
        if quote is None:
            return False
        while source.at + len(self.close) == len(source.text) and not source.ended:
            yield
        return source.text.startswith(quote[1], source.at + len(self.close))

    def read_end(self, source: Source, *, exact: bool = False) -> Reading[None]:
        """Read the closing marker and the white space after it.

        If `exact`, read at most two line breaks, because other white space is part of the answer.
        """
        source.take(source.at + len(self.close))
        if exact:
            for _ in range(2):
                yield from source.marker(_LINE)
        else:
            yield from source.space()
        source.settle()


_LINE = Markers(["\n"])
_OPENING_QUOTE = re.compile(r"""(?:\A|[\s(*])([`"'])\Z""")
_KNOWN = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<thought>", "</thought>"),
    ReasoningMarks("<reasoning>", "</reasoning>"),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningMarks("<|channel>", "<channel|>", label="thought"),
)
_ANSWERS = (("<answer>", "</answer>"), ("<response>", "</response>"), ("<|START_RESPONSE|>", "<|END_RESPONSE|>"))


def find_reasoning_marks(is_token: Callable[[str], bool], template: str) -> ReasoningMarks | None:
    """Return the reasoning markers in a model's vocabulary or template, or None."""
    # A token of the vocabulary is a surer sign than a string in the template.
    for present in (is_token, template.__contains__):
        for marks in _KNOWN:
            if present(marks.open) and present(marks.close):
                return replace(marks, answer=_answer_marks(is_token, template))
    return None


def _answer_marks(is_token: Callable[[str], bool], template: str) -> tuple[str, ...]:
    """Return the markers that some models, such as Cohere's, put around the answer."""
    # `<response>` in a template counts only directly before `</response>`, because some templates contain these tags
    # around the results of tools.
    for marks in _ANSWERS:
        if all(map(is_token, marks)) or "".join(marks) in template or (marks == _ANSWERS[0] and marks[0] in template):
            return marks
    return ()
