"""Interface of the parsers of tool-call formats."""

from typing import Protocol

from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Reading, Source


class ToolCallFormat(Protocol):
    """Parser of a tool-call format. Usually, a family of models uses the same format."""

    @property
    def name(self) -> str:
        """Name of the tool-call format."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that the parser needs to find tool calls. The detokenizer must include them in the text."""
        ...

    @property
    def openers(self) -> tuple[str, ...]:
        """Strings that begin a tool call anywhere in the model's output."""
        ...

    @property
    def leading(self) -> tuple[str, ...]:
        """Strings that begin a tool call only at the beginning of the model's output."""
        ...

    @property
    def closers(self) -> tuple[str, ...]:
        """Strings that end a tool call. If a call cannot be parsed, the text up to such a string is dropped."""
        ...

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one or several tool calls. The unread text of `source` begins with one of `openers` or `leading`.

        If the method reads text without calling `source.settle`, the caller returns this text as plain text.

        Raises:
            NotACall: the text is not a tool call.
        """
        ...
