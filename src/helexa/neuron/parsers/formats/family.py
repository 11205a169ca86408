"""What every family of tool calls has."""

from typing import Protocol

from helexa.neuron.parsers.output import Output
from helexa.neuron.parsers.source import Reading, Source


class Family(Protocol):
    """A notation for tool calls."""

    @property
    def name(self) -> str:
        """What the family is chosen by."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that must be let through into the text, because calls cannot be told without them."""
        ...

    @property
    def openers(self) -> tuple[str, ...]:
        """What begins calls, wherever it stands."""
        ...

    @property
    def leading(self) -> tuple[str, ...]:
        """What begins calls only where the answer begins."""
        ...

    def read(self, source: Source, output: Output) -> Reading[None]:
        """Take calls from the opener on, as many as belong together. What is taken and not settled is text.

        Raises:
            NotACall: likewise; the text before stays read.
        """
        ...
