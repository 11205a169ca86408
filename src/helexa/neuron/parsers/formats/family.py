"""Interface of the parsers of tool-call formats."""

from typing import Protocol

from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Reading, Source


class Family(Protocol):
    """The parser of a tool-call format that a family of models uses."""

    @property
    def name(self) -> str:
        """The format's name."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that the parser needs to detect calls; the detokenizer must include them in the text."""
        ...

    @property
    def openers(self) -> tuple[str, ...]:
        """Strings that begin calls anywhere in the answer."""
        ...

    @property
    def leading(self) -> tuple[str, ...]:
        """Strings that begin calls only if they are at the beginning of the answer."""
        ...

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse one or several calls, beginning at the opener.

        Text that this method reads and does not settle is reported as plain text.

        Raises:
            NotACall: the text is not a call.
        """
        ...
