"""Interface of the parsers of tool-call formats."""

from typing import Protocol

from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Reading, Source


class Family(Protocol):
    """The parser of a tool-call format that a family of models uses."""

    @property
    def name(self) -> str:
        """The name of the tool-call format."""
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
        """Parse one or several calls from the unread text of `source`, which begins with an opener.

        If the method reads text without settling it, the caller reports this text as plain text.

        Raises:
            NotACall: the text is not a call.
        """
        ...
