"""Interface of tool-call formats."""

from typing import Protocol

from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Reading, Source


class Family(Protocol):
    """A tool-call format."""

    @property
    def name(self) -> str:
        """The format's name."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that the detokenizer must keep in the text, because the parser needs them to detect calls."""
        ...

    @property
    def openers(self) -> tuple[str, ...]:
        """Strings that begin calls anywhere in the answer."""
        ...

    @property
    def leading(self) -> tuple[str, ...]:
        """Strings that begin calls only at the beginning of the answer."""
        ...

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Parse a group of calls from the opener on. Text that was read and not settled is plain text.

        Raises:
            NotACall: the text is not a call. Unsettled text is plain text in this case, too.
        """
        ...
